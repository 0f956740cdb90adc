"""Medians, ratios within rounds, and the table."""

from __future__ import annotations

from benchmarks.peers.adapters.worker import Answer
from benchmarks.peers.report import Cell, Row, best_peer, figures, median, page, ratio, summary, table

CHAT = Cell("decode-chat", 1)


def rows(system: str, rates: list[float], cell: Cell = CHAT, run: str = "a", figure: str = "tokens_per_s") -> list[Row]:
    return [
        {"run": run, "round": index, **cell._asdict(), "system": system, figure: rate, "ttft_ms_p99": 2 * rate}
        for index, rate in enumerate(rates)
    ]


def test_throughput_counts_from_the_first_request_to_the_last_token() -> None:
    answers = [
        Answer(start=1.0, first=1.5, last=3.0, num_tokens=4),
        Answer(start=1.0, first=2.5, last=5.0, num_tokens=4),
    ]

    assert summary("decode-chat", [7, 9], answers) == {
        "tokens_per_s": 2.0,
        "ttft_ms_p50": 1000.0,
        "ttft_ms_p99": 1500.0,
    }


def test_prefill_is_prompt_tokens_in_the_time_to_the_first_token() -> None:
    answers = [
        Answer(start=0.0, first=0.5, last=0.5, num_tokens=1),
        Answer(start=0.7, first=1.2, last=1.2, num_tokens=1),
    ]

    assert summary("prefill-128", [128, 128], answers)["tokens_per_s"] == 256.0


def test_a_ratio_compares_rounds_and_not_medians() -> None:
    # The machine is twice as fast in the second round; ours is 1.5 times the peer in each.
    measured = rows("foreword", [150, 300, 15]) + rows("openvino", [100, 200, 10])

    assert ratio(measured, CHAT, "foreword", "openvino") == 1.5
    assert median(measured, CHAT, "foreword") == 150


def test_rounds_of_different_runs_are_not_compared() -> None:
    measured = rows("foreword", [100]) + rows("openvino", [50], run="b")

    assert ratio(measured, CHAT, "foreword", "openvino") is None
    assert best_peer(measured, CHAT, "foreword") is None


def test_the_best_peer_is_the_one_that_ours_does_worst_against() -> None:
    measured = rows("foreword", [150]) + rows("openvino", [100]) + rows("llama.cpp", [120])

    assert best_peer(measured, CHAT, "foreword") == ("llama.cpp", 1.25)


def test_the_best_peer_of_a_wait_has_the_shortest() -> None:
    idle = Cell("ttft-idle", 1)
    measured = [
        row
        for system, wait in (("foreword", 20), ("openvino", 40), ("vllm", 80))
        for row in rows(system, [wait], idle, figure="ttft_ms_p50")
    ]

    assert best_peer(measured, idle, "foreword") == ("openvino", 0.5)


def test_without_speculation_ours_is_compared_with_peers_without() -> None:
    measured = rows("foreword-off", [100]) + rows("openvino", [50]) + rows("openvino-lookup", [200])

    assert best_peer(measured, CHAT, "foreword-off") == ("openvino", 2.0)
    assert best_peer(rows("foreword", [100]) + measured, CHAT, "foreword") == ("openvino-lookup", 0.5)


def test_the_table_has_a_line_per_case_and_says_which_targets_are_missed() -> None:
    measured = rows("foreword", [140]) + rows("foreword-off", [130]) + rows("openvino", [100])
    measured += rows("foreword", [1600], Cell("prefill-1024", 1)) + rows("foreword", [900], Cell("prefill-128", 1))

    header, _, chat, short, long = table(measured).splitlines()

    assert header.startswith("| case | streams | unit | foreword | foreword-off | openvino | foreword / best peer |")
    assert "| 140 | 130 | 100 | 1.40 (openvino) | 1.30 (openvino) |" in chat
    assert "foreword-off >= 1.2: met; foreword >= 1.5: missed" in chat
    assert (short.split(" | ")[0], long.split(" | ")[0]) == ("| prefill-128", "| prefill-1024")
    assert table(measured) in page(measured)


def test_a_wait_has_a_line_for_its_tail() -> None:
    measured = rows("foreword", [20], Cell("ttft-idle", 1), figure="ttft_ms_p50")

    assert [line.split(" | ")[2:4] for line in table(measured).splitlines()[2:]] == [
        ["ms, p50", "20"],
        ["ms, p99", "40"],
    ]


def test_the_plot_has_a_gap_where_a_system_was_not_measured() -> None:
    measured = rows("foreword", [140, 160]) + rows("openvino", [100], Cell("decode-chat", 4))

    drawn = figures(measured)

    assert drawn["systems"] == ["foreword", "openvino"]
    assert drawn["panels"][0]["groups"] == ["1", "4"]
    assert drawn["panels"][0]["values"] == [[150, None], [None, 100]]
