"""Following instructions that a program can check: the data set google/IFEval, others in its form, and a small one that
comes along.

The 25 kinds of instructions (Zhou et al., arXiv:2311.07911) are written from the definitions of the paper and of the
data set. No check takes more than linear time, draws random numbers or needs data that has to be downloaded. They
differ from the published code where that cannot be avoided, or is random:

- Languages are told apart by py3langid: the same answer every time. A text without letters is in no language.
- Sentences are counted by a rule, because the published code asks a model that has to be downloaded (NLTK's Punkt).
- Words in capitals are not cut at apostrophes: DON'T is one.
- Keywords are words, not regular expressions. A letter may be any character.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError, validate_call

from offline_grpo.errors import ConfigError
from offline_grpo.task.answers import tagged_blocks
from offline_grpo.task.problems import Weight
from offline_grpo.task.rows import Row, RowTask, field, shown, text_field
from offline_grpo.types import Problem, Score

MEASURES = ("prompt_strict", "instruction_strict", "prompt_loose", "instruction_loose")
Relation = Literal["less than", "at least"]
Count = Annotated[int, Field(ge=0)]
Ordinal = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[list[Text], Field(min_length=1)]
Letter = Annotated[str, Field(min_length=1, max_length=1)]

OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
"""What `detectable_format:constrained_response` lets a response choose from."""

_ABBREVIATION = re.compile(
    r"[a-z]|dr|mrs?|ms|prof|st|sr|jr|vs|etc|vol|fig|inc|ltd|co|dept|approx|cf|e\.g|i\.e|[ap]\.m|u\.[sk]", re.I
)
"""What a full stop may follow without ending a sentence: also initials."""

_AROUND = "\"'()[]{}*_,:;\u2018\u2019\u201c\u201d\u00ab\u00bb"
_WIDE_ENDS = "\N{IDEOGRAPHIC FULL STOP}\N{FULLWIDTH EXCLAMATION MARK}\N{FULLWIDTH QUESTION MARK}"


def _holds(number: int, relation: Relation, limit: int) -> bool:
    return number < limit if relation == "less than" else number >= limit


def response_language(text: str, language: Text) -> bool:
    import py3langid  # reading its model takes most of a second

    return any(char.isalpha() for char in text) and py3langid.classify(text.lower())[0] == language


def existence(text: str, keywords: Texts) -> bool:
    return all(re.search(re.escape(keyword), text, re.IGNORECASE) for keyword in keywords)


def frequency(text: str, keyword: Text, frequency: Count, relation: Relation) -> bool:
    return _holds(len(re.findall(re.escape(keyword.strip()), text, re.IGNORECASE)), relation, frequency)


def forbidden_words(text: str, forbidden_words: Texts) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, letter: Letter, let_frequency: Count, let_relation: Relation) -> bool:
    return _holds(text.lower().count(letter.lower()), let_relation, let_frequency)


def number_sentences(text: str, num_sentences: Count, relation: Relation) -> bool:
    """A full stop ends no sentence after an abbreviation or the number of a list, or before a lower-case letter."""
    words = re.sub(f"([{_WIDE_ENDS}])", r"\1 ", text).split()
    num_found, is_open = 0, False
    for word, following in pairwise([*words, ""]):
        bare = word.strip(_AROUND)
        is_number = bare[:-1].isdigit() and not is_open
        is_short = _ABBREVIATION.fullmatch(bare[:-1]) is not None
        goes_on = following != "" and (is_number or is_short or following[0].islower())
        is_end = bare.endswith((*"!?…", *_WIDE_ENDS)) or (bare.endswith(".") and not goes_on)
        num_found += is_end
        is_open = not is_end
    return _holds(num_found + is_open, relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: Count) -> bool:
    """Paragraphs are separated by `***`; the first and the last may be empty, which then do not count."""
    parts = [part.strip() for part in text.split("***")]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


def number_words(text: str, num_words: Count, relation: Relation) -> bool:
    return _holds(len(re.findall(r"\w+", text)), relation, num_words)


def nth_paragraph_first_word(text: str, num_paragraphs: Count, nth_paragraph: Ordinal, first_word: Text) -> bool:
    """Paragraphs are separated by an empty line. The first word ends at the first punctuation mark."""
    parts = text.split("\n\n")
    if sum(bool(part.strip()) for part in parts) != num_paragraphs or nth_paragraph > num_paragraphs:
        return False
    words = parts[nth_paragraph - 1].split(maxsplit=1)
    return bool(words) and re.split(r"""[.,?!'"]""", words[0].lstrip("'\""))[0].lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: Count) -> bool:
    """`[name]`, on one line."""
    return sum("[" in part for line in text.split("\n") for part in line.split("]")[:-1]) >= num_placeholders


def postscript(text: str, postscript_marker: Text) -> bool:
    marker = postscript_marker.strip()
    blanks = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    return re.search(blanks.get(marker, re.escape(marker.lower())), text.lower()) is not None


def number_bullet_lists(text: str, num_bullets: Count) -> bool:
    """Lines that begin with `-`, or with one `*`."""
    return len(re.findall(r"^[^\S\n]*(?:-|\*[^*\n])", text, re.MULTILINE)) == num_bullets


def constrained_response(text: str) -> bool:
    return any(option in text for option in OPTIONS)


def number_highlighted_sections(text: str, num_highlights: Count) -> bool:
    """`*words*`; `**words**` counts as well."""
    single = re.findall(r"\*([^\n*]*)\*", text)
    double = re.findall(r"\*\*([^\n*]*)\*\*", text)
    return sum(bool(words.strip()) for words in (*single, *double)) >= num_highlights


def multiple_sections(text: str, section_spliter: Text, num_sections: Count) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    """All of it is JSON, perhaps within a Markdown block."""
    inside = re.sub(r"\A```(?:json|JSON|Json)?|```\Z", "", text.strip())
    try:
        json.loads(inside)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """`<<title>>`, on one line."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end and line[start:end].strip("<> "):
            return True
    return False


def two_responses(text: str) -> bool:
    """Two different ones, separated by `******`; there may be one more before and after."""
    parts = [part.strip() for part in text.split("******")]
    found = [part for part in parts if part]
    return all(parts[1:-1]) and len(found) == 2 and found[0] != found[1]


def repeat_prompt(text: str, prompt_to_repeat: Text) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: Text) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    quoted = text.strip()
    return len(quoted) > 1 and quoted[0] == quoted[-1] == '"'


def capital_word_frequency(text: str, capital_frequency: Count, capital_relation: Relation) -> bool:
    """A word may have hyphens, points and apostrophes within."""
    words = re.findall(r"[^\W_]+(?:[-.'\u2019][^\W_]+)*", text)
    return _holds(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    return text.isupper() and response_language(text, "en")


def english_lowercase(text: str) -> bool:
    return text.islower() and response_language(text, "en")


def no_comma(text: str) -> bool:
    return "," not in text


CHECKS: Mapping[str, Callable[..., bool]] = {
    f"{group}:{check.__name__}": check
    for group, checks in {
        "keywords": (existence, frequency, forbidden_words, letter_frequency),
        "language": (response_language,),
        "length_constraints": (number_sentences, number_paragraphs, number_words, nth_paragraph_first_word),
        "detectable_content": (number_placeholders, postscript),
        "detectable_format": (
            *(number_bullet_lists, constrained_response, number_highlighted_sections),
            *(multiple_sections, json_format, title),
        ),
        "combination": (two_responses, repeat_prompt),
        "startend": (end_checker, quotation),
        "change_case": (capital_word_frequency, english_capital, english_lowercase),
        "punctuation": (no_comma,),
    }.items()
    for check in checks
}
_VALIDATING: Mapping[str, Callable[..., bool]] = {name: validate_call(check) for name, check in CHECKS.items()}


def follows(text: str, instruction_id: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a text follows an instruction. A blank one follows none."""
    return bool(text.strip()) and CHECKS[instruction_id](text, **arguments)


@dataclass(frozen=True, kw_only=True)
class IFEval(RowTask):
    """Prompts with instructions; rows have `prompt`, `instruction_id_list` and `kwargs` (the arguments of each
    instruction). The parts of the reward, each times its weight:

        prompt_strict       1 if the response follows all instructions; such a completion counts as correct
        instruction_strict  the share of the instructions that it follows
        prompt_loose        as prompt_strict; an instruction counts as followed if the response follows it without its
                            first line, its last one or both, each also without asterisks
        instruction_loose   the share of these
        answer, think       `answer_bonus` and `think_bonus`, if there is exactly one block of this tag
    """

    scores_safely: ClassVar[bool] = True

    answer_tag: str | None
    prompt_strict_weight: Weight
    instruction_strict_weight: Weight
    prompt_loose_weight: Weight
    instruction_loose_weight: Weight
    answer_bonus: Weight
    think_bonus: Weight

    def problem_of(self, problem_id: str, row: Row) -> Problem:
        """The answer is a JSON list of instructions and their arguments."""
        prompt = text_field(row, "prompt", "task=ifeval")
        ids, arguments = (field(row, name, "task=ifeval") for name in ("instruction_id_list", "kwargs"))
        if not isinstance(ids, list) or not isinstance(arguments, list) or not ids or len(ids) != len(arguments):
            fix = "instruction_id_list and kwargs must be lists of the same length, not empty"
            raise ConfigError(f"{row.where} {fix}: {shown(row.value)}")
        instructions = []
        for name, values in zip(ids, arguments, strict=True):
            if name not in CHECKS:
                raise ConfigError(f"{row.where} unknown instruction {shown(name)}; known are {', '.join(CHECKS)}")
            # Tables have a column for every argument.
            given = {key: value for key, value in (values or {}).items() if value is not None}
            try:
                _VALIDATING[name]("", **given)
            except ValidationError as error:
                first = error.errors()[0]
                wrong = f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
                raise ConfigError(f"{row.where} instruction {name}, {wrong}: {shown(given)}") from error
            instructions.append((name, given))
        messages = self.messages(row, [{"role": "user", "content": prompt}])
        return Problem(problem_id, messages, json.dumps(instructions))

    def score(self, problem: Problem, text: str) -> Score:
        # The response: all of the text, or the first block of its tag.
        instructions = json.loads(problem.answer)
        blocks = {tag: tagged_blocks(text, tag) for tag in ("think", self.answer_tag or "answer")}
        answers = blocks[self.answer_tag or "answer"]
        response = text if self.answer_tag is None else next(iter(answers), "")
        strict = [follows(response, *instruction) for instruction in instructions]
        # The same where the response may also be read without its outer lines and without asterisks.
        lines = response.split("\n")
        shortened = [response, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
        readings = [*shortened, *(reading.replace("*", "") for reading in shortened)]
        loose = [any(follows(reading, *instruction) for reading in readings) for instruction in instructions]
        shares = (float(all(strict)), sum(strict) / len(strict), float(all(loose)), sum(loose) / len(loose))
        parts = {name: getattr(self, f"{name}_weight") * share for name, share in zip(MEASURES, shares, strict=True)}
        parts["answer"] = self.answer_bonus * (len(answers) == 1)
        parts["think"] = self.think_bonus * (len(blocks["think"]) == 1)
        # The share of the instructions of each kind that the response follows, strictly.
        kinds: dict[str, list[bool]] = {}
        for (kind, _), is_followed in zip(instructions, strict, strict=True):
            kinds.setdefault(f"instruction/{kind.replace(':', '/')}", []).append(is_followed)
        measured = {name: sum(each) / len(each) for name, each in kinds.items()}
        return Score(sum(parts.values()), all(strict), parts, measured=measured)
