"""The 25 kinds of instructions, each on texts that follow it and texts that do not, and the reward made of them."""

import json

import pytest
from factories import compose_config

from offline_grpo.config.compose import as_plain
from offline_grpo.config.problems import build_task
from offline_grpo.task.ifeval import CHECKS, follows
from offline_grpo.types import Problem, Split

LEAST, LESS = "at least", "less than"

ARGUMENTS = {
    "keywords:existence": {"keywords": ["gull", "c++"]},
    "keywords:frequency": {"keyword": "star", "frequency": 2, "relation": LEAST},
    "keywords:forbidden_words": {"forbidden_words": ["cold", "ice"]},
    "keywords:letter_frequency": {"letter": "E", "let_frequency": 3, "let_relation": LESS},
    "language:response_language": {"language": "de"},
    "length_constraints:number_sentences": {"num_sentences": 2, "relation": LEAST},
    "length_constraints:number_paragraphs": {"num_paragraphs": 2},
    "length_constraints:number_words": {"num_words": 3, "relation": LESS},
    "length_constraints:nth_paragraph_first_word": {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Often"},
    "detectable_content:number_placeholders": {"num_placeholders": 2},
    "detectable_content:postscript": {"postscript_marker": "P.S."},
    "detectable_format:number_bullet_lists": {"num_bullets": 2},
    "detectable_format:number_highlighted_sections": {"num_highlights": 2},
    "detectable_format:multiple_sections": {"section_spliter": "Part", "num_sections": 2},
    "combination:repeat_prompt": {"prompt_to_repeat": "Why so? "},
    "startend:end_checker": {"end_phrase": "That is all."},
    "change_case:capital_word_frequency": {"capital_frequency": 2, "capital_relation": LEAST},
}
FOLLOWING = {
    "keywords:existence": ["A Gull wrote C++."],
    "keywords:frequency": ["Star star", "starstar"],
    "keywords:forbidden_words": ["coldness, nice"],
    "keywords:letter_frequency": ["ee", "x"],
    "language:response_language": ["Das Wetter ist heute schön."],
    "length_constraints:number_sentences": ["One. Two.", "Ah! So it is"],
    "length_constraints:number_paragraphs": ["a *** b", "***a\n***\nb***"],
    "length_constraints:number_words": ["two words", "one-two"],
    "length_constraints:nth_paragraph_first_word": ["a\n\noften b", 'a\n\n"Often," he', "a\nb\n\noften"],
    "detectable_content:number_placeholders": ["[a] [b c]", "[][]"],
    "detectable_content:postscript": ["bye\nP.S. more", "p. s. x"],
    "detectable_format:number_bullet_lists": ["* a\n* b", "- a\ntext\n  * b"],
    "detectable_format:constrained_response": ["My answer is no.", "Well. My answer is maybe."],
    "detectable_format:number_highlighted_sections": ["*a* *b*", "**a b**\n*c*"],
    "detectable_format:multiple_sections": ["Part 1 a Part 2 b", "Part1Part\n2"],
    "detectable_format:json_format": ['{"a": 1}', "```json\n[1]\n```", "```\n2\n```"],
    "detectable_format:title": ["<<a>>", "x <<<a b>>> y"],
    "combination:two_responses": ["a******b", "******a******b******"],
    "combination:repeat_prompt": ["  why so? Because."],
    "startend:end_checker": ["So, THAT is all. ", '"Hm. That is all."'],
    "startend:quotation": ['"a"', ' "a" b "c" '],
    "change_case:capital_word_frequency": ["STOP it NOW", "U.S.A. A-B", "DON'T GO"],
    "change_case:english_capital": ["THE CAT SAT ON THE MAT AND SLEPT"],
    "change_case:english_lowercase": ["the cat sat on the mat and slept"],
    "punctuation:no_comma": ["a; b"],
}
OTHERS = {
    "keywords:existence": ["a gull", "c++", "gul l c+"],
    "keywords:frequency": ["star", "a sta r star"],
    "keywords:forbidden_words": ["so Cold!", "ICE"],
    "keywords:letter_frequency": ["eEe", "e e e e"],
    "language:response_language": ["The weather is fine today.", "1 2 3", "\ud800"],
    "length_constraints:number_sentences": ["One", "One, two: three."],
    "length_constraints:number_paragraphs": ["a", "a\n\nb", "a *** *** b", "a***b***c"],
    "length_constraints:number_words": ["one two three", "a-b-c"],
    "length_constraints:nth_paragraph_first_word": ["often\n\na", "a\n\noften\n\nb", "a\n\noftentimes"],
    "detectable_content:number_placeholders": ["[a]", "[a\n] [b]", "[[a]"],
    "detectable_content:postscript": ["PS more", "P.P.S"],
    "detectable_format:number_bullet_lists": ["* a", "** a\n** b", "* a\n* b\n- c"],
    "detectable_format:constrained_response": ["no", "my answer is no."],
    "detectable_format:number_highlighted_sections": ["*a*", "** **", "*a\n* b"],
    "detectable_format:multiple_sections": ["Part 1", "part 1 part 2", "Part one Part two"],
    "detectable_format:json_format": ["a: 1", '{"a": 1} or so', "[" * 10**5, "9" * 5000],
    "detectable_format:title": ["<a>", "<<a\n>>", "<<>>", ">>a<<"],
    "combination:two_responses": ["a", "a******a", "a******b******c", "a************b"],
    "combination:repeat_prompt": ["Because. Why so?"],
    "startend:end_checker": ["That is all. Or", "all."],
    "startend:quotation": ["a", '"', '"a', "'a'"],
    "change_case:capital_word_frequency": ["STOP it", "STOP-IT now", "Stop It", "1 2 3"],
    "change_case:english_capital": ["THE CAT Sat", "DIE KATZE SCHLIEF AUF DER MATTE", "123"],
    "change_case:english_lowercase": ["The cat sat", "die katze schlief auf der matte", "123"],
    "punctuation:no_comma": ["a, b"],
}


def make(option="ifeval_sample", **settings):
    return build_task(as_plain(compose_config(f"task={option}").task) | settings)


def test_texts_that_follow_an_instruction_and_texts_that_do_not():
    assert FOLLOWING.keys() == OTHERS.keys() == CHECKS.keys()
    for kind in CHECKS:
        for text in [*FOLLOWING[kind], *OTHERS[kind], "", " \n"]:
            assert follows(text, kind, ARGUMENTS.get(kind, {})) is (text in FOLLOWING[kind]), (kind, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Dr. Smith met Mr. Jones at 3.5 p.m. in town. They left.", 2),
        ('Is it? Yes! "No." (Maybe.)', 4),
        ("Well... perhaps. J. Doe said so", 2),
        ("今日は晴れ。明日は雨。", 2),
    ],
)
def test_sentences_are_counted(text, expected):
    kind = "length_constraints:number_sentences"
    assert follows(text, kind, {"num_sentences": expected, "relation": LEAST})
    assert follows(text, kind, {"num_sentences": expected + 1, "relation": LESS})


def problem(*instructions):
    return Problem("train-0", ({"role": "user", "content": "?"},), json.dumps(instructions))


NO_COMMA, QUOTED = ("punctuation:no_comma", {}), ("startend:quotation", {})


def test_the_reward_is_a_mean_over_instructions_strict_and_loose():
    task = make()
    one, both = problem(NO_COMMA), problem(NO_COMMA, QUOTED)
    assert task.score(one, "fine").reward == pytest.approx(1.0)
    assert task.score(both, '"fine"').reward == pytest.approx(1.0)  # not more for more instructions
    half = task.score(both, "fine")
    assert (half.is_correct, half.reward) == (False, pytest.approx(0.3 / 2 + 0.1 / 2))
    loose = task.score(both, 'Sure, here it is:\n"fine"')
    assert (loose.is_correct, loose.reward) == (False, pytest.approx(0.2 + 0.1))
    assert task.score(both, "").reward == 0


def test_the_small_set_has_every_kind():
    task = make()
    problems = [*task.problems(Split.TRAIN), *task.problems(Split.EVAL)]
    assert {kind for each in problems for kind, _ in json.loads(each.answer)} == CHECKS.keys()
    assert (len(task.problems(Split.EVAL)), len(problems)) == (12, 62)


def test_empty_columns_are_no_arguments(tmp_path):
    """As in google/IFEval, whose rows have a column for every argument of every kind."""
    file = tmp_path / "table.jsonl"
    empty = {"instruction_id_list": ["startend:quotation"], "kwargs": [{"language": None, "num_words": None}]}
    rows = [{"key": 1, "prompt": f"Say {i}."} | empty for i in range(10)]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert json.loads(make(path=str(file)).problems(Split.TRAIN)[0].answer) == [["startend:quotation", {}]]


def test_no_text_takes_long():
    """A scorer with quadratic time would take minutes over these."""
    long = 10_000
    pieces = ("a", "*", "[", "<<", "a. ", "(((a ", "\n", " \n -", "{", "P.", "Part1", "字。", "\"'")
    texts = [piece * long for piece in pieces]
    instructions = [(kind, ARGUMENTS.get(kind, {})) for kind in CHECKS]
    for text in texts:
        make().score(problem(*instructions), text)
