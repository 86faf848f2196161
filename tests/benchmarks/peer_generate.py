"""The peer of bench_serving: a Python-backend model as one would write it today, with Hugging Face's `generate`.

Same weights, same catalogue, same beams, same dynamic batching; the constraint is a `prefix_allowed_tokens_fn` over a
trie of dicts. It takes a history and returns item ids and scores.
"""

import json
from pathlib import Path

import numpy as np
import torch
import triton_python_backend_utils as pb_utils
from transformers import T5ForConditionalGeneration


class TritonPythonModel:
    """One instance of the peer."""

    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"]) / args["model_version"]
        spec = json.loads((folder / "peer.json").read_text())
        self.count, self.width, self.starts = spec["num_results"], spec["beam_width"], np.array(spec["starts"])
        self.model = T5ForConditionalGeneration.from_pretrained(folder / "model").eval()
        codes = np.load(folder / "codes.npy")
        self.tokens = codes + self.starts
        self.items: dict[tuple, int] = {}
        self.trie: dict = {}
        for item, row in enumerate(self.tokens.tolist()):
            self.items.setdefault(tuple(row), item)
            node = self.trie
            for token in row:
                node = node.setdefault(token, {})

    def allowed(self, _batch: int, tokens: torch.Tensor) -> list[int]:
        """Tokens that may follow."""
        node = self.trie
        for token in tokens.tolist()[1:]:
            node = node.get(token, {})
        return list(node) or [1]

    @torch.inference_mode()
    def execute(self, requests: list) -> list:
        """One call of `generate` for the whole batch."""
        prompts = []
        for request in requests:
            history = pb_utils.get_input_tensor_by_name(request, "history").as_numpy()[0]
            prompts.append(self.tokens[history].reshape(-1))
        longest = max(map(len, prompts))
        input_ids = torch.zeros((len(prompts), longest), dtype=torch.int64)
        mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, : len(prompt)] = torch.from_numpy(prompt)
            mask[row, : len(prompt)] = 1
        out = self.model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            num_beams=self.width,
            num_return_sequences=self.count,
            max_new_tokens=len(self.starts),
            min_new_tokens=len(self.starts),
            length_penalty=0.0,
            prefix_allowed_tokens_fn=self.allowed,
            return_dict_in_generate=True,
            output_scores=True,
        )
        sequences = out.sequences[:, 1:].reshape(len(prompts), self.count, -1).tolist()
        scores = out.sequences_scores.reshape(len(prompts), self.count).float().numpy()
        responses = []
        for row in range(len(prompts)):
            ids = np.array([[self.items.get(tuple(sequence), -1) for sequence in sequences[row]]], np.int64)
            tensors = [pb_utils.Tensor("item_ids", ids), pb_utils.Tensor("scores", scores[row : row + 1])]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
