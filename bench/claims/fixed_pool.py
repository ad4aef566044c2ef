"""Claim: in the same pool, paging holds more sequences and so generates more tokens/s. Real services."""

from matplotlib.figure import Figure

from bench.claims.claim import Claim, Data, Plot, Setting, Table, Verdict, Watch, judged
from bench.claims.drawing import MEMORY_COLOURS, MEMORY_NAMES
from bench.claims.served import Served, num_equal, run_load, trace_for, warm_up, with_services
from quire.async_client import AsyncClient

_BLOCK_SIZE = 16
_MODEL_LENGTHS_IN_POOL = 6  # number of longest requests that the pool holds
_MIN_RATIO = 2.5


async def measure(setting: Setting, watch: Watch) -> Data:
    watch.expect(len(MEMORY_NAMES))
    served = {}
    facts: Data = {}
    for memory in MEMORY_NAMES:
        watch.step(memory)
        served[memory], facts = await _measure_memory(setting, memory)
    rows = [
        run.row() | {"memory": memory, "num_equal_outputs": num_equal(served["paged"].outputs, run.outputs)}
        for memory, run in served.items()
    ]
    curves = [{"memory": memory} | run.curve() for memory, run in served.items()]
    return facts | {"rows": rows, "curves": curves}


async def _measure_memory(setting: Setting, memory: str) -> tuple[Served, Data]:
    max_model_len = 512 if setting.is_quick else 2048
    num_clients = 16 if setting.is_quick else 64
    num_requests = 24 if setting.is_quick else 256
    num_blocks = _MODEL_LENGTHS_IN_POOL * max_model_len // _BLOCK_SIZE

    async def measure(client: AsyncClient) -> tuple[Served, Data]:
        info = await client.server_info()
        trace = trace_for(setting, info, num_requests, num_clients)
        await warm_up(client, trace_for(setting, info, 8, 0))
        return await run_load(client, trace, num_clients), {
            "num_blocks": info.num_blocks,
            "block_size": info.block_size,
            "max_model_len": info.max_model_len,
            "max_num_seqs": info.max_num_seqs,
            "num_clients": num_clients,
            "num_requests": num_requests,
        }

    flags = {
        "memory": memory,
        "num_blocks": num_blocks + 1,
        "block_size": _BLOCK_SIZE,
        "max_model_len": max_model_len,
        "max_num_seqs": num_clients,
    }
    return await with_services(setting, flags, measure)


def conditions(data: Data) -> str:
    return (
        f"Real services with one pool of {data['num_blocks']} blocks of {data['block_size']} tokens: room for "
        f"{data['num_blocks'] * data['block_size'] // data['max_model_len']} requests of {data['max_model_len']:,} "
        f"tokens, the longest possible. {data['num_clients']} clients in a closed loop send {data['num_requests']} "
        "requests of mixed lengths, the same for each kind of memory, with continuous batching. The server reads the "
        "length of a request from its max_tokens, which is exact here, as for the oracle of the paper."
    )


def verdict(data: Data) -> Verdict:
    rows = {row["memory"]: row for row in data["rows"]}
    paged, contiguous = rows["paged"], rows["contiguous"]
    most = paged["max_batch"] / contiguous["max_batch"]
    mean = paged["mean_batch"] / contiguous["mean_batch"]
    rate = paged["output_tokens_per_s"] / contiguous["output_tokens_per_s"]
    exact = rows["contiguous-exact"]
    ours = (
        f"paged holds {paged['max_batch']} sequences, contiguous {contiguous['max_batch']} ({most:.1f} ×; on average "
        f"{mean:.1f} ×), with {rate:.2f} × the tokens/s"
    )
    reason = (
        f"In one pool, a step computes {paged['mean_batch']:.1f} sequences when memory is paged, "
        f"{contiguous['mean_batch']:.1f} when each sequence reserves the longest possible request, and "
        f"{exact['mean_batch']:.1f} when each reserves exactly what it will need. Paging preempted "
        f"{paged['num_preemptions']} times."
    )
    if paged["max_batch"] >= data["num_clients"]:
        reason += f" More than {data['num_clients']} sequences were not possible: there were no more clients."
    if rate < most:
        reason += (
            f" Throughput grows by less than the batch ({rate:.2f} × for {mean:.1f} ×), because a step with more "
            f"sequences takes longer here: {paged['mean_step_ms']:.1f} ms against {contiguous['mean_step_ms']:.1f} ms."
        )
    if (exact_rate := exact["output_tokens_per_s"] / paged["output_tokens_per_s"]) > 1:
        reason += (
            f" Reserving exactly makes {exact_rate:.2f} × the tokens/s of paging here: it needs lengths that servers "
            "do not know, runs fewer sequences and preempts none."
        )
    if all(row["num_equal_outputs"] == row["num_requests"] for row in data["rows"]):
        reason += " Greedy outputs are the same in all modes."
    return Verdict(judged([most >= _MIN_RATIO, rate > 1.0]), ours, reason)


def tables(data: Data) -> list[Table]:
    rows = tuple(
        (
            row["memory"],
            str(row["max_batch"]),
            f"{row['mean_batch']:.1f}",
            f"{row['output_tokens_per_s']:.0f}",
            f"{row['requests_per_s']:.2f}",
            f"{row['ttft_p50_ms']:.0f}",
            str(row["num_preemptions"]),
            f"{row['mean_step_ms']:.2f}",
        )
        for row in data["rows"]
    )
    headings = ("memory", "sequences, most", "mean", "tokens/s", "requests/s", "TTFT p50, ms", "preempted", "ms a step")
    return [Table("One pool, one trace.", headings, rows)]


def plots(data: Data) -> list[Plot]:
    caption = "Sequences that run at once in one pool, over time, and the resulting tokens per second."
    return [Plot("fixed-pool", caption, lambda figure: _draw(figure, data), (9.6, 4.2))]


def _draw(figure: Figure, data: Data) -> None:
    over_time, rates = figure.subplots(1, 2, width_ratios=(1.7, 1))
    for curve in data["curves"]:
        colour = MEMORY_COLOURS[curve["memory"]]
        over_time.step(
            curve["seconds"], curve["num_sequences"], where="post", color=colour, label=curve["memory"], linewidth=1.1
        )
    over_time.set_ylim(0, data["num_clients"] * 1.05)
    over_time.set_xlim(left=0)
    over_time.set_xlabel("time, s")
    over_time.set_ylabel("sequences of a step")
    names = [row["memory"] for row in data["rows"]]
    rates.barh(
        range(len(names)),
        [row["output_tokens_per_s"] for row in data["rows"]],
        color=[MEMORY_COLOURS[name] for name in names],
        height=0.6,
    )
    rates.set_yticks(range(len(names)), [name.replace("contiguous-", "contiguous,\n") for name in names])
    rates.invert_yaxis()
    rates.grid(visible=False, axis="y")
    rates.set_xlabel("output tokens/s")
    over_time.legend(loc="upper right", fontsize="small")


CLAIM = Claim(
    name="fixed-pool",
    title="The same memory holds more sequences when it is paged",
    source="Kwon et al., SOSP 2023, section 6.2: 2.2 × the batch of Orca (Oracle), 4.3 × that of Orca "
    "(Max), and 1.7–2.7 × and 2.7–8 × the request rate",
    figure="2.2–4.3 × as many sequences at once; to show here: at least 2.5 × contiguous in the same pool",
    measure=measure,
    conditions=conditions,
    verdict=verdict,
    tables=tables,
    plots=plots,
)
