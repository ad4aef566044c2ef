"""Claim: continuous batching refills a slot as soon as it is free. Runs one workload in each batching mode."""

import random
import statistics

from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from bench.claims.claim import Claim, Data, Plot, Setting, Table, Verdict, Watch, judged, percent
from bench.claims.core_runs import CoreSetting, run_core
from bench.claims.drawing import GREY
from scheduler.core import Scheduler

BATCHING_NAMES = ("static", "dynamic", "continuous")
_NUM_SLOTS = 8
_MAX_MODEL_LEN = 512
_NUM_AT_ONCE, _STEPS_BETWEEN = 4, 3
_MAX_IDLE = 0.02
_NUM_COLOURS = 20


class _Occupancy:
    """Records the request in each slot, step by step."""

    def __init__(self) -> None:
        self.spans: list[list[int]] = []  # [slot, request, first step, step after the last]
        self._open: dict[int, list[int]] = {}
        self._slot_of: dict[int, int] = {}

    def observe(self, step: int, core: Scheduler) -> None:
        running = {sequence.request.request_id: sequence for sequence in core.state.batch.running}
        for request_id, sequence in running.items():
            if sequence.slot >= 0:  # it has no slot in its last step
                self._slot_of[request_id] = sequence.slot
            elif request_id not in self._slot_of:
                raise RuntimeError(f"request {request_id} ended in the step that admitted it")
            if request_id not in self._open:
                self._open[request_id] = [self._slot_of[request_id], request_id, step, step]
                self.spans.append(self._open[request_id])
            self._open[request_id][3] = step + 1


async def measure(setting: Setting, watch: Watch) -> Data:
    watch.expect(len(BATCHING_NAMES))
    rng = random.Random(setting.seed)
    num_requests = 12 if setting.is_quick else 24
    lengths = [(rng.randint(8, 24), max(3, min(96, round(rng.lognormvariate(3.2, 0.8))))) for _ in range(num_requests)]
    arrival_steps = [max(0, number + 1 - _NUM_AT_ONCE) * _STEPS_BETWEEN for number in range(num_requests)]
    modes = []
    for batching in BATCHING_NAMES:
        watch.step(batching)
        occupancy = _Occupancy()
        core = CoreSetting(1024, _NUM_SLOTS, _MAX_MODEL_LEN, batching=batching)
        num_steps = run_core(core, lengths, occupancy.observe, arrival_steps=arrival_steps)
        num_busy = sum(end - start for _, _, start, end in occupancy.spans)
        modes.append(
            {
                "batching": batching,
                "num_steps": num_steps,
                "busy_ratio": num_busy / (num_steps * _NUM_SLOTS),
                "idle_ratio": num_idle_while_waiting(occupancy.spans, arrival_steps, _NUM_SLOTS)
                / (num_steps * _NUM_SLOTS),
                "mean_wait": statistics.fmean(
                    start - arrival_steps[request] for _, request, start, _ in occupancy.spans
                ),
                "spans": occupancy.spans,
            }
        )
    return {"num_slots": _NUM_SLOTS, "lengths": lengths, "arrival_steps": arrival_steps, "modes": modes}


def num_idle_while_waiting(spans: list[list[int]], arrival_steps: list[int], num_slots: int) -> int:
    """Counts empty slots, summed over the steps, for which a request was waiting."""
    started = {request: start for _, request, start, _ in spans}
    num_idle = 0
    for step in range(max(end for *_, end in spans)):
        num_busy = sum(start <= step < end for _, _, start, end in spans)
        num_waiting = sum(arrival <= step < started[request] for request, arrival in enumerate(arrival_steps))
        num_idle += min(num_slots - num_busy, num_waiting)
    return num_idle


def conditions(data: Data) -> str:
    longest = max(output for _, output in data["lengths"])
    return (
        f"The shipped scheduler core; every step is answered at once. {len(data['lengths'])} requests arrive, "
        f"{_NUM_AT_ONCE} at the start and then one every {_STEPS_BETWEEN} steps, for {data['num_slots']} slots, with "
        f"outputs of up to {longest} tokens; the same in each mode. A dynamic batch waits until it is full, or five "
        "steps. All steps count the same, however many sequences they compute; the throughput claim measures their "
        "cost."
    )


def verdict(data: Data) -> Verdict:
    modes = {mode["batching"]: mode for mode in data["modes"]}
    continuous, static = modes["continuous"], modes["static"]
    holds = [
        continuous["idle_ratio"] <= _MAX_IDLE < static["idle_ratio"],
        continuous["num_steps"] < min(static["num_steps"], modes["dynamic"]["num_steps"]),
    ]
    ours = "slots that are empty while a request waits: " + ", ".join(
        f"{name} {percent(mode['idle_ratio'], 0)} ({mode['num_steps']} steps in all)" for name, mode in modes.items()
    )
    reason = (
        f"With continuous batching a request waits {continuous['mean_wait']:.1f} steps for a slot on average, and only "
        f"while all slots are taken. With static batching it waits {static['mean_wait']:.1f} steps, beside slots that "
        "stay empty until the longest request of its batch has ended. The same requests take "
        f"{static['num_steps'] / continuous['num_steps']:.2f} times as many steps."
    )
    return Verdict(judged(holds), ours, reason)


def tables(data: Data) -> list[Table]:
    rows = tuple(
        (
            mode["batching"],
            str(mode["num_steps"]),
            percent(mode["busy_ratio"]),
            percent(mode["idle_ratio"]),
            f"{mode['mean_wait']:.1f}",
        )
        for mode in data["modes"]
    )
    return [
        Table(
            "The same requests in each mode.",
            ("batching", "steps", "slots busy", "empty while a request waits", "wait, steps"),
            rows,
        )
    ]


def plots(data: Data) -> list[Plot]:
    caption = (
        "Slots over steps, coloured by request. A gap is a slot that computes nothing. Numbers are the requests in "
        "the order of arrival."
    )
    return [Plot("timeline", caption, lambda figure: _draw(figure, data), (9.6, 6.6))]


def _draw(figure: Figure, data: Data) -> None:
    panels = figure.subplots(len(data["modes"]), 1, sharex=True, squeeze=False)[:, 0]
    longest = max(mode["num_steps"] for mode in data["modes"])
    gap = longest / 500
    palette = colormaps["tab20"]
    for axes, mode in zip(panels, data["modes"], strict=True):
        for slot, request, start, end in mode["spans"]:
            colour = to_hex(palette(request % _NUM_COLOURS))
            axes.barh(slot, end - start - gap, left=start, height=0.82, color=colour)
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
    "secondary texts draw slots over time",
    figure="iteration-level scheduling: a request joins at the next step, leaves when it ends",
    measure=measure,
    conditions=conditions,
    verdict=verdict,
    tables=tables,
    plots=plots,
)
