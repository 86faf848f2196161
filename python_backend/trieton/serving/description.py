"""What a version says about itself when a request asks for it: one JSON object, the output `description`."""

import json
from typing import Any

from trieton.search.searcher import Searcher

PARAMETERS = {
    "num_results": "integer: items wanted",
    "beam_width": "integer: prefixes that survive each level, at least num_results",
    "constraint": "text: a boolean expression over the named sets",
    "normalise": "vocabulary, level or allowed: over what the probabilities of a step add up to 1",
    "strict": "true or false: refuse item ids that the catalogue does not have, instead of skipping and counting them",
    "describe": "true or false: answer with this description instead of a search",
}


def describe(searcher: Searcher, *, model: str, version: int, config: dict[str, Any]) -> str:
    """The description of a loaded version.

    Args:
        config: the model's config as the server gives it, parsed; names the inputs and outputs.

    Returns:
        JSON text: model, version, bundle_id; the catalogue (item_id_type, num_items, num_semantic_ids, num_levels,
        codebook_sizes, sets with their sizes, base_constraint); limits with defaults; retriever and prompt; the names
        of parameters, inputs and outputs.
    """
    index, limits, spec = searcher.index, searcher.limits, searcher.retriever.spec
    manifest = searcher.bundle.manifest
    return json.dumps(
        {
            "model": model,
            "version": version,
            "bundle_id": searcher.bundle.bundle_id,
            "item_id_type": "string" if index.catalog.is_text else "int64",
            "num_items": index.num_items,
            "num_semantic_ids": index.num_leaves,
            "num_levels": index.num_levels,
            "codebook_sizes": list(index.codebook_sizes),
            "sets": manifest["sets"],
            "base_constraint": manifest.get("base_constraint"),
            "limits": {
                "num_results": {"default": limits.default_num_results, "max": limits.max_num_results},
                "beam_width": {"default": limits.default_beam_width, "max": limits.max_beam_width},
                "max_list_items": limits.max_list_items,
                "max_batch_size": int(config["max_batch_size"]),
            },
            "retriever": {
                "family": spec.family,
                "engine": spec.engine,
                "dtype": spec.dtype,
                "normalise": spec.normalise,
                "vocab_size": spec.vocab_size,
                "fingerprint": spec.fingerprint,
            },
            "prompt": {**spec.prompt.to_json(), "max_length": spec.max_length},
            "parameters": PARAMETERS,
            "inputs": [entry["name"] for entry in config["input"]],
            "outputs": [entry["name"] for entry in config["output"]],
        }
    )
