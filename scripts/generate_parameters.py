"""Write the table of body parameters that vLLM and OpenAI know, from the request models that are installed.

Run it once in an environment of each supported vLLM release with ``--merge`` to keep the union:

    python scripts/generate_parameters.py --merge

The table never decides alone: it says which names exist and of which JSON types they are; the runner's own vLLM
has the last word.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter

TARGET = Path(__file__).resolve().parent.parent / "airflow_vllm_batch" / "batchfile" / "parameters.json"

# Where a release keeps a model: the first module that has it wins, so older layouts are tried after newer ones.
VLLM_MODELS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "/v1/chat/completions": (("ChatCompletionRequest", ("openai.chat_completion.protocol", "openai.protocol")),),
    "/v1/completions": (("CompletionRequest", ("openai.completion.protocol", "openai.protocol")),),
    "/v1/embeddings": (("EmbeddingRequest", ("pooling.embed.protocol", "openai.protocol")),),
    "/v1/responses": (("ResponsesRequest", ("openai.responses.protocol", "openai.protocol")),),
    "/v1/score": (("ScoreRequest", ("pooling.scoring.protocol", "pooling.score.protocol", "openai.protocol")),),
    "/v1/rerank": (("RerankRequest", ("pooling.scoring.protocol", "pooling.score.protocol", "openai.protocol")),),
}

OPENAI_PARAMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "/v1/chat/completions": (
        "openai.types.chat.completion_create_params",
        ("CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming"),
    ),
    "/v1/completions": (
        "openai.types.completion_create_params",
        ("CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming"),
    ),
    "/v1/embeddings": ("openai.types.embedding_create_params", ("EmbeddingCreateParams",)),
    "/v1/responses": (
        "openai.types.responses.response_create_params",
        ("ResponseCreateParamsNonStreaming", "ResponseCreateParamsStreaming"),
    ),
}

Parameter = dict[str, Any]
"""``types``: JSON types, absent where any may stand; ``minimum`` and ``maximum`` where the model declares them."""


def find_model(name: str, modules: tuple[str, ...]) -> Any:
    for module in modules:
        try:
            found = importlib.import_module(f"vllm.entrypoints.{module}")
        except ImportError:
            continue
        if hasattr(found, name):
            return getattr(found, name)
    raise SystemExit(f"this vLLM has no {name} in any of {', '.join(modules)}: name its new module in VLLM_MODELS")


def alternatives(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what a value may be, with references and unions resolved; an empty mapping stands for anything."""
    if "$ref" in schema:
        yield from alternatives(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    elif options := schema.get("anyOf") or schema.get("oneOf"):
        for option in options:
            yield from alternatives(option, definitions)
    elif "const" in schema and "type" not in schema:
        yield {"type": "null" if schema["const"] is None else "string"}
    else:
        yield schema


def describe(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Parameter:
    options = list(alternatives(schema, definitions))
    if any("type" not in option for option in options):
        return {}
    described: Parameter = {"types": sorted({option["type"] for option in options})}
    numbers = [option for option in options if option["type"] in {"integer", "number"}]
    if len(numbers) == 1:
        described |= {bound: numbers[0][bound] for bound in ("minimum", "maximum") if bound in numbers[0]}
    return described


def vllm_parameters(model: Any) -> dict[str, Parameter]:
    """Return the parameters of a request model, or of all members of a union of them."""
    schema = TypeAdapter(model).json_schema(mode="validation")
    definitions = schema.get("$defs", {})
    found: dict[str, Parameter] = {}
    for option in alternatives(schema, definitions):
        for name, value in option["properties"].items():
            parameter = describe(value, definitions)
            found[name] = widen(found[name], parameter) if name in found else parameter
    return found


def widen(one: Parameter, other: Parameter) -> Parameter:
    """Return what either admits."""
    if "types" not in one or "types" not in other:
        return {}
    merged: Parameter = {"types": sorted({*one["types"], *other["types"]})}
    for bound, choose in (("minimum", min), ("maximum", max)):
        if bound in one and bound in other:
            merged[bound] = choose(one[bound], other[bound])
    return merged


def openai_names(module: str, names: tuple[str, ...]) -> set[str]:
    found = importlib.import_module(module)
    return {parameter for name in names for parameter in get_type_hints(getattr(found, name))}


def build() -> dict[str, Any]:
    import openai
    import vllm

    endpoints: dict[str, dict[str, Parameter]] = {}
    for url, models in VLLM_MODELS.items():
        table: dict[str, Parameter] = {}
        for name, modules in models:
            table |= vllm_parameters(find_model(name, modules))
        if url in OPENAI_PARAMS:
            # Names only: where vLLM does not know one it ignores the value, so its type does not matter.
            for name in openai_names(*OPENAI_PARAMS[url]):
                table.setdefault(name, {})
        endpoints[url] = table
    return {"versions": {"vllm": [vllm.__version__], "openai": [openai.__version__]}, "endpoints": endpoints}


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return the union of two tables."""
    versions = {
        package: sorted({*old["versions"].get(package, []), *listed}) for package, listed in new["versions"].items()
    }
    endpoints: dict[str, dict[str, Parameter]] = {}
    for url in old["endpoints"].keys() | new["endpoints"].keys():
        before, now = old["endpoints"].get(url, {}), new["endpoints"].get(url, {})
        endpoints[url] = before | now | {name: widen(before[name], now[name]) for name in before.keys() & now.keys()}
    return {"versions": versions, "endpoints": endpoints}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--merge", action="store_true", help="keep what the present table has, of other releases")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the table would change")
    parser.add_argument("--output", type=Path, default=TARGET)
    arguments = parser.parse_args()
    table = build()
    if arguments.merge and arguments.output.exists():
        table = merge(json.loads(arguments.output.read_text(encoding="utf-8")), table)
    text = json.dumps(table, indent=1, sort_keys=True) + "\n"
    if arguments.check:
        return int(text != arguments.output.read_text(encoding="utf-8"))
    arguments.output.write_text(text, encoding="utf-8")
    counts = ", ".join(f"{url} {len(names)}" for url, names in sorted(table["endpoints"].items()))
    sys.stdout.write(f"{arguments.output}: {table['versions']}; {counts}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
