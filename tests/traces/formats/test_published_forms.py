"""Public traces are read and detected in their published form."""

import json
from pathlib import Path
from typing import Any

import pytest

from plexrl.errors import InvalidRequestError, TraceError
from plexrl.traces import Problem, ResponseLength, TraceJob, check_trace, open_trace
from plexrl.traces.formats import detect
from plexrl.traces.formats.servegen import Draw
from plexrl.traces.io.json_list import CHUNK_CHARACTERS, json_elements

FOLDER = Path(__file__).parent / "layouts"

PHILLY_JOB: dict[str, Any] = {
    "status": "Pass",
    "vc": "ee9e8c",
    "jobid": "application_1506638472019_14199",
    "attempts": [
        {
            "start_time": "2017-10-07 01:12:09",
            "end_time": "2017-10-07 01:13:23",
            "detail": [
                {"ip": "m47", "gpus": ["gpu0", "gpu1", "gpu2", "gpu3"]},
                {"ip": "m48", "gpus": ["gpu4", "gpu5", "gpu6", "gpu7"]},
            ],
        },
        {
            "start_time": "2017-10-07 01:13:30",
            "end_time": "2017-10-09 06:53:12",
            "detail": [{"ip": "m412", "gpus": ["gpu0"]}],
        },
    ],
    "submitted_time": "2017-10-07 01:11:39",
    "user": "ce2f4c",
}
"""The example of the release's own page."""


def test_the_flat_copy_of_philly_has_a_job_to_a_line(tmp_path: Path) -> None:
    path = tmp_path / "philly.csv"
    path.write_text(
        "timestamp,duration,num_gpus,gpu_time,cluster\n"
        "2017-10-09 07:01:55,66.0,1,66.0,11cb48\n2017-10-07 01:11:39,193256.0,8,1546048.0,ee9e8c\n"
    )
    assert detect(path) == "philly-flat"
    assert list(open_trace(path).rows) == [
        TraceJob(job_id="philly-3", tenant="ee9e8c", submit_s=0.0, duration_s=193256.0, gpus=8),
        TraceJob(job_id="philly-2", tenant="11cb48", submit_s=193816.0, duration_s=66.0, gpus=1),
    ]


def test_the_released_log_of_philly_says_the_same_as_its_flat_copy(tmp_path: Path) -> None:
    path = tmp_path / "cluster_job_log"
    path.write_text(json.dumps([PHILLY_JOB]))
    assert detect(path) == "philly-log"
    [job] = open_trace(path).rows
    assert job == TraceJob(
        job_id="application_1506638472019_14199",
        tenant="ee9e8c",
        submit_s=0.0,
        duration_s=193256.0,
        gpus=8,
        wait_s=30.0,
        outcome="completed",
    )


def test_jobs_of_the_log_that_never_ran_or_ran_on_are_counted_and_faults_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "cluster_job_log"
    attempt = PHILLY_JOB["attempts"][0]
    backwards = {**attempt, "start_time": "2017-10-08 01:12:09"}
    jobs = [
        PHILLY_JOB,
        {**PHILLY_JOB, "jobid": "b", "attempts": []},
        {**PHILLY_JOB, "jobid": "c", "attempts": [{**attempt, "end_time": None}]},
        {**PHILLY_JOB, "jobid": "d", "submitted_time": "yesterday"},
        {**PHILLY_JOB, "jobid": "e", "attempts": [backwards]},
        {**PHILLY_JOB, "jobid": "f", "attempts": {}},
        {**PHILLY_JOB},
        "no job",
    ]
    path.write_text("[\n" + ",\n".join(map(json.dumps, jobs)) + "\n]\n")
    told: list[Problem] = []
    source, good = check_trace(path, on_problem=told.append)
    assert good == 1
    assert dict(source.left_out) == {"never ran": 1, "still ran when the log was taken": 1}
    assert [(each.line, each.field) for each in told] == [
        *((5, "submitted_time"), (6, "attempts[].end_time"), (7, "attempts")),
        *((8, "jobid"), (9, "")),
    ]


@pytest.mark.parametrize("indent", [None, 4])
def test_a_list_longer_than_a_piece_is_read_whole(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "list.json"
    values = [{"at": index, "text": "é" * 1000, "n": 10**index} for index in range(1500)]
    path.write_text(json.dumps(values, indent=indent, ensure_ascii=False), encoding="utf-8")
    assert path.stat().st_size > 2 * CHUNK_CHARACTERS
    told: list[Problem] = []
    found = list(json_elements(path, told.append))
    assert [value for _, value in found] == values
    assert not told
    lines = path.read_text(encoding="utf-8").split("\n")
    assert all(lines[line - 1].strip().startswith(("{", "[{")) for line, _ in found)


@pytest.mark.parametrize("text", ['[{"a": 1}, {"a": ', '[{"a": 1} {"a": 2}]', '[{"a": 1}'])
def test_a_list_that_breaks_off_is_told_by_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "list.json"
    path.write_text("\n" + text)
    told: list[Problem] = []
    assert len(list(json_elements(path, told.append))) == 1
    assert [each.line for each in told] == [2]


def servegen(folder: Path) -> Path:
    """Two clients: one of short, one of long responses, the latter three times as busy."""
    for client, tokens, rate in ((0, 10, 1.0), (7, 1000, 3.0)):
        window = {
            "input_tokens": f"{{{tokens}: 0.5, {2 * tokens}: 0.5}}",
            "output_tokens": f"{{{tokens + 1}: 1.0}}",
            "reason_ratio": "{0.5: 1.0}",
        }
        quiet = dict.fromkeys(window, "{}")
        (folder / f"chunk-{client}-dataset.json").write_text(
            json.dumps({"0": window, "600": quiet}, indent=2)
        )
        (folder / f"chunk-{client}-trace.csv").write_text(
            f"0,{rate},1.2,Gamma,0.5,2.0\n600,0,0,,0,0\n1200,{rate},1.2,Weibull,0.5,2.0\n"
        )
    return folder


def test_requests_are_drawn_from_servegen_s_clients_by_their_rates(tmp_path: Path) -> None:
    source = open_trace(servegen(tmp_path), draw=Draw(requests=2000, seed=1))
    assert source.format == "servegen"
    rows: list[ResponseLength] = list(source.rows)
    assert len(rows) == 2000
    assert {(row.source, row.output_tokens) for row in rows} == {("0", 11), ("7", 1001)}
    assert sum(row.source == "7" for row in rows) == pytest.approx(1500, abs=100)
    assert {row.prompt_tokens for row in rows} == {10, 20, 1000, 2000}
    arrivals = [row.arrival_s for row in rows if row.arrival_s is not None]
    assert arrivals == sorted(arrivals)
    assert len(arrivals) == len(rows)
    assert not any(600 < at < 1200 for at in arrivals), "nobody sent anything then"
    again = open_trace(tmp_path, draw=Draw(requests=2000, seed=1))
    assert list(again.rows) == rows
    assert list(open_trace(tmp_path, draw=Draw(requests=2000, seed=2)).rows) != rows


def test_one_client_of_servegen_without_its_rates_has_no_arrivals(tmp_path: Path) -> None:
    path = servegen(tmp_path) / "chunk-7-dataset.json"
    path.with_name("chunk-7-trace.csv").unlink()
    rows = list(open_trace(path, draw=Draw(requests=5)).rows)
    assert [row.arrival_s for row in rows] == [None] * 5
    assert {row.output_tokens for row in rows} == {1001}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("1001: 1.0", "1001: -1"), "0.output_tokens has tokens or probabilities below 0"),
        (("1001: 1.0", "many: 1"), "0.output_tokens is not a distribution"),
        (('"output_tokens"', '"outputs"'), "is not a client of ServeGen"),
        (('"600": {', '"600": 0 {'), "is not JSON"),
    ],
)
def test_a_client_of_servegen_that_is_none_is_named(
    tmp_path: Path, change: tuple[str, str], told: str
) -> None:
    path = servegen(tmp_path) / "chunk-7-dataset.json"
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(TraceError, match=told) as error:
        list(open_trace(path, format="servegen").rows)
    assert str(path) in error.value.message


def test_vidur_s_arrivals_are_read(tmp_path: Path) -> None:
    path = tmp_path / "splitwise_conv.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n4.314579,396,109\n1,x,9\n")
    told: list[Problem] = []
    source = open_trace(path, skip_bad=True, on_problem=told.append)
    assert list(source.rows) == [
        ResponseLength(output_tokens=109, prompt_tokens=396, arrival_s=4.314579)
    ]
    assert [(each.line, each.field) for each in told] == [(3, "num_prefill_tokens")]


def test_alibaba_s_tasks_are_known_without_their_header() -> None:
    assert detect(FOLDER / "alibaba-2020.csv") == "alibaba-2020"


NEAR = {
    "job_id,user,gpu_num,state,submit_time,duration\n": "nearest is helios (it also needs vc)",
    "timestamp,duration,gpus,cluster\n": "nearest is philly-flat (it also needs num_gpus",
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli\n": "nearest is alibaba-2023 (it also needs",
    "instance;gpus;times\n": "separated by semicolons",
    "timing_s/gen,timing_s/update_actor\n": "convert --from wandb",
    "output_tokens,model\n": "model is not a column",
    "a,b\n": "--from knows jobs, lengths",
}


@pytest.mark.parametrize("header", NEAR)
def test_a_header_that_is_not_known_is_held_against_the_nearest(
    tmp_path: Path, header: str
) -> None:
    path = tmp_path / "what.csv"
    path.write_text(header + "1,2\n")
    with pytest.raises((InvalidRequestError, TraceError)) as error:
        open_trace(path)
    assert NEAR[header] in error.value.message


HEADERS = {
    "missing": (b"job_id,gpus,duration_s\na,1,5\n", "submit_s is missing from the header"),
    "twice": (b"job_id,submit_s,gpus,gpus,duration_s\na,0,1,1,5\n", "gpus is repeated"),
    "misspelt": (b"job_id,submit_s,gpus,duration_s,tennant\na,0,1,5,t\n", "did you mean tenant"),
    "semicolons": (b"job_id;submit_s;gpus;duration_s\na;0;1;5\n", "separated by semicolons"),
    "tabs": (b"job_id\tsubmit_s\tgpus\tduration_s\na\t0\t1\t5\n", "separated by tabs"),
    "empty": (b"", "is empty"),
    "blank": (b"\n \n", "is empty"),
    "workbook": (b"PK\x03\x04" + bytes(50), "an Excel workbook"),
    "gzip": (b"\x1f\x8b\x08\x00", "compressed by gzip: name it"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    "web page": (b"<!DOCTYPE html>\n<html>\n", "a web page"),
    "UTF-16": ("job_id,submit_s".encode("utf-16"), "UTF-16"),
    "JSON": (b'{"job_id": "a"}\n', "begins a json lines"),
}


@pytest.mark.parametrize("case", HEADERS)
@pytest.mark.parametrize("skip_bad", [True, False])
def test_a_fault_of_the_header_is_fatal_whether_or_not_bad_rows_are_skipped(
    tmp_path: Path, case: str, skip_bad: bool
) -> None:
    content, told = HEADERS[case]
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    with pytest.raises(TraceError) as error:
        open_trace(path, format="jobs", skip_bad=skip_bad)
    assert told in error.value.message
    assert str(path) in error.value.message


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("gpu_num", "gpus"), "gpu_num is missing from the header; helios needs it"),
        (("queue", "duration"), "duration is repeated"),
        ((",", ";"), "separated by semicolons"),
    ],
)
def test_a_fault_of_a_public_trace_s_header_is_fatal_too(
    tmp_path: Path, change: tuple[str, str], told: str
) -> None:
    path = tmp_path / "helios.csv"
    path.write_text((FOLDER / "helios.csv").read_text().replace(*change))
    with pytest.raises(TraceError, match=told):
        open_trace(path, format="helios", skip_bad=True)


def test_the_wrong_layout_is_told_by_the_right_one() -> None:
    with pytest.raises(TraceError, match="not those of helios but of --from acme"):
        open_trace(FOLDER / "kalos.csv", format="helios")


def test_a_column_of_the_user_s_own_is_a_fault_that_can_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("job_id,submit_s,gpus,duration_s,cost_centre\na,0,1,5,x\n")
    with pytest.raises(TraceError, match="cost_centre is not a column"):
        open_trace(path)
    assert [job.job_id for job in open_trace(path, skip_bad=True).rows] == ["a"]
