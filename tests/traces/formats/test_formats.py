"""Column layouts of public traces, as documented by their publishers, become rows."""

from pathlib import Path

import pytest

from plexrl.errors import InvalidRequestError, TraceError
from plexrl.traces import (
    Problem,
    ResponseLength,
    TraceJob,
    bundled,
    check_trace,
    open_trace,
    read_jobs,
    read_lengths,
)
from plexrl.traces.bundled import FILES
from plexrl.traces.formats import detect, load, read_histogram

FOLDER = Path(__file__).parent / "layouts"
"""Files of a few rows, made up in the columns and the manner of each source."""

LAYOUTS: dict[str, tuple[str, list[TraceJob], int]] = {
    "philly": (
        "philly",
        [
            TraceJob(
                job_id="philly-0", tenant="7f04ca", submit_s=0.0, duration_s=2240194.0, gpus=8
            ),
            TraceJob(
                job_id="philly-1", tenant="6214e9", submit_s=235696.0, duration_s=3256045.0, gpus=1
            ),
        ],
        0,
    ),
    "helios": (
        "helios",
        [
            TraceJob(
                job_id="1425511",
                tenant="vcJkd",
                submit_s=0.0,
                duration_s=36848.0,
                gpus=1,
                wait_s=0.0,
                outcome="completed",
            ),
            TraceJob(
                job_id="1425512",
                tenant="vchbv",
                submit_s=26.0,
                duration_s=249.0,
                gpus=4,
                wait_s=10.0,
                outcome="failed",
            ),
        ],
        1,
    ),
    "seren": (
        "acme",
        [
            TraceJob(
                job_id="5778432",
                tenant="u5907",
                submit_s=0.0,
                duration_s=117.0,
                gpus=8,
                model="Other",
                wait_s=32.0,
                outcome="failed",
            ),
            TraceJob(
                job_id="5778469",
                tenant="u5907",
                submit_s=336.0,
                duration_s=2693.0,
                gpus=8,
                model="Pretrain",
                wait_s=13.0,
                outcome="completed",
            ),
        ],
        1,
    ),
    "kalos": (
        "acme",
        [
            TraceJob(
                job_id="dlctk696s0jbvitv",
                tenant="uf794",
                submit_s=0.0,
                # Its column `duration` says 18, with the 10 s in the queue.
                duration_s=8.0,
                gpus=64,
                model="Other",
                wait_s=10.0,
                outcome="failed",
            )
        ],
        2,
    ),
    "alibaba-2020": (
        "alibaba-2020",
        [
            TraceJob(
                job_id="a1b3/worker",
                submit_s=0.0,
                duration_s=30.0,
                gpus=1,
                node_type="T4",
                outcome="failed",
            ),
            TraceJob(
                job_id="4f05/tensorflow",
                submit_s=62.0,
                duration_s=38.0,
                gpus=3,
                node_type="MISC",
                outcome="completed",
            ),
        ],
        2,
    ),
    "alibaba-2023": (
        "alibaba-2023",
        [
            TraceJob(
                job_id="openb-pod-0017",
                submit_s=0.0,
                duration_s=1332357.0,
                gpus=8,
                wait_s=0.0,
                outcome="completed",
            ),
            TraceJob(
                job_id="openb-pod-0035",
                submit_s=529561.0,
                duration_s=1512.0,
                gpus=1,
                node_type="V100M16|V100M32",
                wait_s=5.0,
            ),
        ],
        1,
    ),
    "alibaba-2026": (
        "alibaba-2026",
        [
            TraceJob(
                job_id="239255",
                tenant="13",
                submit_s=0.0,
                duration_s=2764799.0,
                gpus=1,
                node_type="A10",
                priority=1,
            ),
            TraceJob(
                job_id="437260",
                tenant="57",
                submit_s=9589663.0,
                duration_s=41060.0,
                gpus=16,
                node_type="A100-SXM4-80GB",
            ),
        ],
        0,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_public_layout_becomes_jobs_in_order(name: str) -> None:
    layout, wanted, left_out = LAYOUTS[name]
    path = FOLDER / f"{name}.csv"
    if layout != "alibaba-2020":
        assert detect(path) == layout, "its header says which it is"
    source = open_trace(path, format=layout if layout == "alibaba-2020" else None)
    assert source.format == layout
    assert list(source.rows) == wanted
    assert source.left_out.total() == left_out
    assert source.problems.count == 0


def test_alibaba_tasks_may_have_their_header_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "pai.csv"
    names = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu"
    path.write_text(f"{names},gpu_type\n{(FOLDER / 'alibaba-2020.csv').read_text()}")
    assert detect(path) == "alibaba-2020"
    assert list(open_trace(path).rows) == LAYOUTS["alibaba-2020"][1]


LENGTHS = {
    "arrival_s,client,prompt_tokens,output_tokens,reason_ratio\n2.4,48,433,457,0.798\n": (
        ResponseLength(output_tokens=457, prompt_tokens=433, arrival_s=2.4, source="48")
    ),
    "arrival_s,prompt_tokens,output_tokens,kv_blocks_512\n0.0,6758,500,14\n": (
        ResponseLength(output_tokens=500, prompt_tokens=6758, arrival_s=0.0)
    ),
    "prompt_tokens,output_tokens\n3772,54\n": (
        ResponseLength(output_tokens=54, prompt_tokens=3772)
    ),
    "num_prefill_tokens,num_decode_tokens\n3772,54\n": (
        ResponseLength(output_tokens=54, prompt_tokens=3772)
    ),
}


@pytest.mark.parametrize("text", LENGTHS)
def test_public_response_lengths_are_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    assert list(open_trace(path).rows) == [LENGTHS[text]]


def test_mooncake_and_azure_as_they_are_published(tmp_path: Path) -> None:
    lines = tmp_path / "conversation_trace.jsonl"
    lines.write_text(
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n'
    )
    wanted = ResponseLength(output_tokens=52, prompt_tokens=6955, arrival_s=27.482)
    assert list(open_trace(lines).rows) == [wanted]
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.6805900,396,109\n"
    )
    rows = list(load(azure).rows)
    assert [(row.prompt_tokens, row.output_tokens) for row in rows] == [(374, 44), (396, 109)]
    assert [row.arrival_s for row in rows] == [0.0, 4.0]


def test_faults_of_a_public_trace_are_told_by_its_own_fields(tmp_path: Path) -> None:
    path = tmp_path / "helios.csv"
    header, first, *_ = (FOLDER / "helios.csv").read_text().splitlines()
    bad = first.replace("1425511", "2").replace(",1,1,1,", ",one,1,1,").replace("2020-06-09", "9")
    negative = first.replace("1425511", "3").replace("2020-06-10", "2020-06-08")
    path.write_text("\n".join([header, first, bad, negative, first, "too,short"]) + "\n")
    told: list[Problem] = []
    source, good = check_trace(path, on_problem=told.append)
    assert good == 1
    assert [(each.line, each.field) for each in told] == [
        *((3, "submit_time"), (3, "start_time"), (3, "gpu_num")),
        *((4, "end_time"), (5, "job_id"), (6, "")),
    ]
    assert source.problems.bad_lines == 4
    with pytest.raises(TraceError) as error:
        list(open_trace(path).rows)
    assert error.value.details["count"] == 6


@pytest.mark.parametrize("more", ["", "Session ID,Elapsed time,"])
def test_burstgpt_is_read_as_response_lengths_without_its_failures(
    tmp_path: Path, more: str
) -> None:
    path = tmp_path / "BurstGPT_1.csv"
    cells = "7,2.5," if more else ""
    path.write_text(
        f"Timestamp,{more}Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        f"5,{cells}ChatGPT,472,18,490,Conversation log\n"
        f"45,{cells}GPT-4,1087,0,1087,API log\n118,{cells}GPT-4,417,276,693,API log\n"
    )
    source, _ = check_trace(path)
    assert dict(source.left_out) == {"failed: it has no response": 1}
    assert source.problems.count == 0
    assert list(open_trace(path).rows) == [
        ResponseLength(output_tokens=18, prompt_tokens=472, arrival_s=5.0, source="ChatGPT"),
        ResponseLength(output_tokens=276, prompt_tokens=417, arrival_s=118.0, source="GPT-4"),
    ]


def test_jobs_of_kalos_that_still_ran_or_waited_are_counted_by_reason() -> None:
    source, good = check_trace(FOLDER / "kalos.csv")
    assert good == 1
    assert source.problems.count == 0
    assert dict(source.left_out) == {"still ran when the log was taken": 1, "never ran": 1}


def test_a_task_of_alibaba_that_still_ran_is_counted_as_such() -> None:
    source, _ = check_trace(FOLDER / "alibaba-2020.csv")
    assert dict(source.left_out) == {"still ran when the log was taken": 1, "asks for no GPU": 1}


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "what.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidRequestError, match="no known trace has these columns"):
        load(path)
    with pytest.raises(InvalidRequestError, match="unknown layout"):
        open_trace(path, format="borg")
    with pytest.raises(TraceError, match="gpu_num is missing from the header; helios needs it"):
        load(path, "helios")


def test_what_is_bundled_is_whole() -> None:
    assert next(iter(read_jobs(bundled("philly"), skip_bad=True))).gpus == 8
    assert sum(1 for _ in read_lengths(bundled("azure-conversation"), skip_bad=True)) == 19_366
    law = read_histogram(bundled("r1-lengths"))
    assert 450 < law.quantile(0.5) < 550
    assert 15_000 < law.quantile(0.99) < 17_500
    attribution = (bundled("philly").parent / "ATTRIBUTION.md").read_text()
    assert all(name in attribution for name in FILES.values())
    with pytest.raises(InvalidRequestError, match="use philly"):
        bundled("alibaba")


def test_a_histogram_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "histogram.csv"
    path.write_text("output_tokens_from,output_tokens_to,probability\n5,9,0.5\n7,12,x\n8,6,0.1\n")
    with pytest.raises(TraceError) as error:
        read_histogram(path)
    problems = error.value.details["problems"]
    assert isinstance(problems, list)
    assert [(each["line"], each["field"]) for each in problems] == [
        (3, "probability"),
        (4, "output_tokens_from"),
    ]
