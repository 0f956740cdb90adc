"""What it costs that outputs follow a form, measured through gRPC.

Starts `foreword serve` without speculation, so that every token is a step of its own, and streams the prompts of
`benchmarks/serving.py`, in rounds that alternate between free and constrained outputs of the same length. Prints one
JSON line per constraint and number of streams:

    tokens_per_s    output tokens of all streams / time from first request to last token, with the constraint
    ratio_to_free   the same divided by that without a constraint; of both the median round
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics

from server_process import server
from serving import run_round

from foreword.v1.constraint_pb2 import Constraint

# None of these forms can end within a few hundred tokens.
SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 80},
            "kind": {"enum": ["fact", "example", "question"]},
            "year": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        },
        "required": ["title", "kind", "year", "tags"],
        "additionalProperties": False,
    },
}
GRAMMAR = r"""
root   ::= "[" ws (object "," ws){500,} "]"
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws     ::= "" | " " | "\n" [ \t]{0,20}
"""
CONSTRAINTS = {
    "json-schema": Constraint(json_schema=json.dumps(SCHEMA)),
    "regex": Constraint(regex=r"([A-Z][a-z]+( [a-z]+){3,12}[.?!] ){200}"),
    "recursive-grammar": Constraint(grammar=GRAMMAR),
}


def tokens_per_s(address: str, num_streams: int, num_tokens: int, constraint: Constraint | None = None) -> float:
    """Throughput of one round."""
    streams = asyncio.run(run_round(address, num_streams, num_tokens, constraint))
    seconds = max(stream.last for stream in streams) - min(stream.sent for stream in streams)
    return sum(stream.num_tokens for stream in streams) / seconds


def main() -> None:
    """Print one JSON line per constraint and number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constraints", nargs="+", choices=CONSTRAINTS, default=list(CONSTRAINTS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of every stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("serve", nargs="*", help="arguments for `foreword serve`, after --")
    options = parser.parse_args()
    with server(["--speculation", "off", *options.serve]) as (address, _):
        for constraint in CONSTRAINTS.values():  # warm-up
            tokens_per_s(address, 1, 16, constraint)
        for num_streams in options.streams:
            for name in options.constraints:
                rates = [
                    [tokens_per_s(address, num_streams, options.tokens, form) for form in (None, CONSTRAINTS[name])]
                    for _ in range(options.rounds)
                ]
                free, guided = map(statistics.median, zip(*rates, strict=True))
                row = {"constraint": name, "streams": num_streams, "tokens_per_s": round(guided, 1)}
                print(json.dumps(row | {"ratio_to_free": round(guided / free, 3)}), flush=True)


if __name__ == "__main__":
    main()
