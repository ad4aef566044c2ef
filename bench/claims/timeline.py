"""Claim: continuous batching refills a slot the moment it is free. One workload in each batching mode, to be seen."""

import random

from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from bench.claims.claim import Claim, Data, Plot, Setting, Table, Verdict, Watch, judged, percent
from bench.claims.core_runs import CoreSetting, run_closed_loop
from bench.claims.drawing import GREY
from scheduler.core import Scheduler, StepPlan

BATCHING_NAMES = ("static", "dynamic", "continuous")
_NUM_SLOTS = 8
_MAX_MODEL_LEN = 512
_MIN_CONTINUOUS_BUSY = 0.85
_NUM_COLOURS = 20


class _Seats:
    """Who sat in which slot, step by step."""

    def __init__(self) -> None:
        self.spans: list[list[int]] = []  # [slot, request, first step, step after the last]
        self._open: dict[int, list[int]] = {}
        self._slot_of: dict[int, int] = {}
        self._step = 0

    def observe(self, core: Scheduler, plan: StepPlan) -> None:
        running = {sequence.request.request_id: sequence for sequence in core.running_sequences()}
        for request_id, sequence in running.items():
            if sequence.slot >= 0:  # it has none in its last step
                self._slot_of[request_id] = sequence.slot
            elif request_id not in self._slot_of:
                raise RuntimeError(f"request {request_id} ended in the step that admitted it")
            if request_id not in self._open:
                self._open[request_id] = [self._slot_of[request_id], request_id, self._step, self._step]
                self.spans.append(self._open[request_id])
            self._open[request_id][3] = self._step + 1
        self._step += 1


async def measure(setting: Setting, watch: Watch) -> Data:
    watch.expect(len(BATCHING_NAMES))
    rng = random.Random(setting.seed)
    num_requests = 12 if setting.is_quick else 24
    lengths = [(rng.randint(8, 24), max(3, min(96, round(rng.lognormvariate(3.2, 0.8))))) for _ in range(num_requests)]
    modes = []
    for batching in BATCHING_NAMES:
        watch.step(batching)
        seats = _Seats()
        core = CoreSetting(1024, _NUM_SLOTS, _MAX_MODEL_LEN, batching=batching)
        num_steps = run_closed_loop(core, lengths, num_requests, seats.observe)
        num_busy = sum(end - start for _, _, start, end in seats.spans)
        modes.append(
            {
                "batching": batching,
                "num_steps": num_steps,
                "busy_ratio": num_busy / (num_steps * _NUM_SLOTS),
                "spans": seats.spans,
            }
        )
    return {"num_slots": _NUM_SLOTS, "num_requests": num_requests, "lengths": lengths, "modes": modes}


def conditions(data: Data) -> str:
    longest = max(output for _, output in data["lengths"])
    return (
        f"The shipped scheduler core, every step answered at once: {data['num_requests']} requests that are all "
        "there at the "
        f"start, {data['num_slots']} slots, outputs of up to {longest} tokens; the same requests in each mode. A "
        "step is a step, "
        "however many sequences it computes: what a step costs is the business of the throughput claim."
    )


def verdict(data: Data) -> Verdict:
    modes = {mode["batching"]: mode for mode in data["modes"]}
    continuous, static = modes["continuous"], modes["static"]
    # Once nobody waits, nobody can take a free slot: the tail is not the mode's fault.
    filled = busy_while_waiting(continuous["spans"], data["num_slots"])
    holds = [filled >= _MIN_CONTINUOUS_BUSY, continuous["num_steps"] < static["num_steps"]]
    ours = ", ".join(
        f"{name} {mode['num_steps']} steps ({percent(mode['busy_ratio'], 0)} of slots busy)"
        for name, mode in modes.items()
    )
    reason = (
        f"While requests wait, continuous batching keeps {percent(filled, 0)} of the slots busy; a static batch ends "
        "with its "
        f"longest request, and the slots of the others stay empty until then. The same requests take "
        f"{static['num_steps'] / continuous['num_steps']:.2f} times as many steps."
    )
    return Verdict(judged(holds), ours, reason)


def busy_while_waiting(spans: list[list[int]], num_slots: int) -> float:
    """Share of slots that are busy, up to the step in which the last request is admitted."""
    last = max(start for _, _, start, _ in spans)
    if last == 0:
        return 1.0
    return sum(min(end, last) - min(start, last) for _, _, start, end in spans) / (last * num_slots)


def tables(data: Data) -> list[Table]:
    rows = tuple(
        (
            mode["batching"],
            str(mode["num_steps"]),
            percent(mode["busy_ratio"]),
            percent(busy_while_waiting(mode["spans"], data["num_slots"])),
        )
        for mode in data["modes"]
    )
    return [
        Table("The same requests in each mode.", ("batching", "steps", "slots busy", "… while requests wait"), rows)
    ]


def plots(data: Data) -> list[Plot]:
    caption = (
        "Slots over steps, coloured by request: an empty place is a slot that computes nothing. Numbers are the "
        "requests, "
        "in order of arrival."
    )
    return [Plot("timeline", caption, lambda figure: _draw(figure, data), (9.6, 6.6))]


def _draw(figure: Figure, data: Data) -> None:
    panels = figure.subplots(len(data["modes"]), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(mode["num_steps"] for mode in data["modes"])
    palette = colormaps["tab20"]
    for axes, mode in zip(panels, data["modes"], strict=True):
        for slot, request, start, end in mode["spans"]:
            colour = to_hex(palette(request % _NUM_COLOURS))
            axes.barh(slot, end - start, left=start, height=0.82, color=colour)
            if end - start >= longest / 45:
                axes.text(
                    (start + end) / 2,
                    slot,
                    str(request + 1),
                    ha="center",
                    va="center_baseline",
                    fontsize=8,
                    color="#101418",
                )
        axes.axvline(mode["num_steps"], color=GREY, linewidth=1.2, linestyle=":")
        axes.set_title(
            f"{mode['batching']}: {mode['num_steps']} steps, {percent(mode['busy_ratio'], 0)} busy", loc="left"
        )
        axes.set_yticks(range(data["num_slots"]), [str(slot + 1) for slot in range(data["num_slots"])], fontsize=8)
        axes.set_ylim(data["num_slots"] - 0.5, -0.5)
        axes.set_ylabel("slot")
        axes.grid(visible=False, axis="y")
    panels[-1].set_xlim(0, 1.01 * longest)
    panels[-1].set_xlabel("step")


CLAIM = Claim(
    name="timeline",
    title="A free slot is refilled at once, not when the whole batch has ended",
    source="Yu et al., “Orca: A Distributed Serving System for Transformer-Based Generative Models”, OSDI 2022, "
    "section 3; "
    "secondary texts show it as a picture of slots over time",
    figure="iteration-level scheduling: a request joins at the next step, leaves when it ends",
    measure=measure,
    conditions=conditions,
    verdict=verdict,
    tables=tables,
    plots=plots,
)
