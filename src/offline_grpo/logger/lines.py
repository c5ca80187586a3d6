"""What the console says about metrics: cells, and how many of them a line has room for."""

from __future__ import annotations

from collections.abc import Sequence

from offline_grpo.types import Metrics

GAP = "  "
LARGE = 1e6
TRAIN_FIELDS = (
    # label, metric, format; a narrow line has the first of them only
    ("reward", "reward_mean", "{:.3f}"),
    ("success", "success_rate", "{:.3f}"),
    ("server", "sync/frozen", "frozen"),  # where it is
    ("KL", "kl_divergence", "{:.4f}"),
    ("gen tok/s", "perf/generate_tokens_per_s", "{:,.0f}"),
    ("grad norm", "grad_norm", "{:.3f}"),
    ("train tok/s", "perf/train_tokens_per_s", "{:,.0f}"),
    ("entropy", "entropy", "{:.3f}"),
    ("loss", "loss_total", "{:+.4f}"),
    ("clipped", "clip_frac", "{:.1%}"),
)


def train_cells(metrics: Metrics) -> list[tuple[str, str]]:
    """(label, formatted value) of the fields that are present; for example, there is no KL without a reference."""
    return [(label, _shown(form, metrics[key])) for label, key, form in TRAIN_FIELDS if key in metrics]


def _shown(form: str, value: float) -> str:
    """A number of few digits, also where a reward has many."""
    return f"{value:.3g}" if form.endswith("f}") and "," not in form and abs(value) >= LARGE else form.format(value)


def train_line(at: str, metrics: Metrics, left: str, *, width: int) -> str:
    """`  3/100  reward 0.412  success 0.375  ...  0:01:10 left`, with as many metrics as `width` has room for, two at
    least."""
    cells = [f"{label} {value}" for label, value in train_cells(metrics)]
    while len(cells) > 2 and len(GAP.join([at, *cells, left])) > width:
        cells.pop()
    return GAP.join([at, *cells, left])


def eval_cells(metrics: Metrics) -> list[str]:
    """`pass@1 0.431 [0.380, 0.490]` for each k, with its 95% interval."""
    keys = sorted(
        (key for key in metrics if key.startswith("pass@") and key[5:].isdigit()), key=lambda key: int(key[5:])
    )
    cells = [f"{key} {metrics[key]:.3f} [{metrics[f'{key}_low']:.3f}, {metrics[f'{key}_high']:.3f}]" for key in keys]
    return [*cells, "frozen server, not the policy"] if "sync/frozen" in metrics else cells


def folded(head: str, cells: Sequence[str], *, width: int) -> list[str]:
    """Lines of at most `width` with `head` and the cells; a cell that has no room goes to the next line, below the
    first cell.
    """
    lines = [head]
    for cell in cells:
        is_first = len(lines) == 1 and lines[0] == head
        if not is_first and len(lines[-1]) + len(GAP) + len(cell) > width:
            lines.append(" " * len(head))
        lines[-1] += GAP + cell
    return lines


def clock(seconds: float) -> str:
    """`1:02:03`, hours first."""
    minutes, second = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}"


def short(name: str, letters: int) -> str:
    """The beginning of a name that is longer."""
    return name if len(name) <= letters else f"{name[: letters - 1]}…"
