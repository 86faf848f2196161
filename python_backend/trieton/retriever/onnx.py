"""The exported graphs on ONNX Runtime, bound so that no tensor is copied between steps.

The prompt's keys and values stay where prefill wrote them and are bound once; a step binds its tokens, its parents and
the suffix that the step before put out.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

# The threads of an operator wait for each other at its end. On a machine that does anything else, one of them is always
# late: under load one thread beats two. So one is the default, and whoever has cores to spare asks for more.
DEFAULT_THREADS = 1


class OnnxEngine:
    """`prefill.onnx` and `decode.onnx` of one retriever. Safe to call from several threads."""

    def __init__(self, folder: Path, *, threads: int | None = None, device: str | None = None):
        """Load the graphs.

        Args:
            threads: threads of an operator; None takes one.
            device: "cpu" or "cuda"; None takes CUDA where ONNX Runtime was built with it.

        Raises:
            ValueError: a graph is missing or ONNX Runtime cannot read it.
        """
        threads = threads or DEFAULT_THREADS
        cuda = "CUDAExecutionProvider" in ort.get_available_providers()
        if device == "cuda" and not cuda:
            raise ValueError("device: cuda asked for, but this build of ONNX Runtime has no CUDA provider")
        self.device = device or ("cuda" if cuda else "cpu")
        # Newer releases of ONNX Runtime share memory (its pull request 27836); else logits pass through the host.
        # The next run waits for the kernel, whose codes it takes from the host, before it may write there again.
        self._shares = self.device == "cuda" and hasattr(ort.OrtValue, "__dlpack__")
        self._prefill = open_session(folder / "prefill.onnx", threads, self.device)
        self._decode = open_session(folder / "decode.onnx", threads, self.device)
        outputs = [output.name for output in self._prefill.get_outputs()]
        self._prefix = [name for name in outputs if name.startswith("prefix.")]
        self._prefill_outputs = outputs
        self._decode_outputs = [output.name for output in self._decode.get_outputs()]
        present = [name for name in self._decode_outputs if name.startswith("present.")]
        self._past = [name.replace("present.", "past_key_values.", 1) for name in present]
        self._first_suffix = present[0] in outputs

    def prefill(
        self, input_ids: np.ndarray, attention_mask: np.ndarray, level_tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, "OnnxState"]:
        """int64 [B, S], int64 [B, S], int64 [W] -> logits float32 [B, 1, W], log_z float32 [B, 1], state."""
        binding = self._prefill.io_binding()
        binding.bind_cpu_input("input_ids", input_ids)
        binding.bind_cpu_input("attention_mask", attention_mask)
        binding.bind_cpu_input("level_tokens", level_tokens)
        logits, log_z, *rest = self._run(self._prefill, binding, self._prefill_outputs)
        prefix, suffix = rest[: len(self._prefix)], rest[len(self._prefix) :]
        if not self._first_suffix:
            suffix = [self._empty_suffix(value) for value in prefix]
        bound = self._decode.io_binding()
        bound.bind_cpu_input("attention_mask", attention_mask)
        for name, value in zip(self._prefix, prefix, strict=True):
            bound.bind_ortvalue_input(name, value)
        # ONNX Runtime reads the arrays in place, so the state keeps them alive.
        return self._hand_out(logits), self._hand_out(log_z), OnnxState(bound, suffix, (attention_mask, *prefix))

    def decode(
        self, state: "OnnxState", input_ids: np.ndarray, parents: np.ndarray, level_tokens: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """One token per beam: int64 [B, M], int64 [B, M], int64 [W] -> logits float32 [B, M, W], log_z float32 [B, M].

        `state` afterwards holds the suffixes of these beams.
        """
        binding = state.binding
        binding.bind_cpu_input("input_ids", input_ids)
        binding.bind_cpu_input("parents", parents)
        binding.bind_cpu_input("level_tokens", level_tokens)
        for name, value in zip(self._past, state.suffix, strict=True):
            binding.bind_ortvalue_input(name, value)
        logits, log_z, *state.suffix = self._run(self._decode, binding, self._decode_outputs)
        return self._hand_out(logits), self._hand_out(log_z)

    def beams(self, table: np.ndarray, codes: Any, parents: Any) -> tuple[np.ndarray, np.ndarray]:
        """Tokens `table[codes]` and parents int64 [B, M], dead beams at the first of each."""
        return table.take(host(codes), mode="clip"), np.maximum(host(parents), 0).astype(np.int64, copy=False)

    def _empty_suffix(self, prefix: ort.OrtValue) -> ort.OrtValue:
        """Keys or values [B, 1, G, 0, D] for a prompt's [B, G, S, D]."""
        batch, heads, _, dim = prefix.shape()
        dtype = np.float16 if prefix.data_type() == "tensor(float16)" else np.float32
        return ort.OrtValue.ortvalue_from_numpy(np.zeros((batch, 1, heads, 0, dim), dtype), self.device)

    def _run(self, session: ort.InferenceSession, binding: ort.IOBinding, outputs: list[str]) -> list[ort.OrtValue]:
        for name in outputs:
            host = name in ("logits", "log_z") and not self._shares
            binding.bind_output(name, "cpu" if host else self.device)
        session.run_with_iobinding(binding)
        return binding.get_outputs()

    def _hand_out(self, value: ort.OrtValue) -> Any:
        """Logits for the kernel: a tensor over the same memory of the device, or a NumPy array."""
        if not self._shares:
            return value.numpy()
        import torch  # whoever runs on CUDA has it, for the kernel

        return torch.from_dlpack(value)


class OnnxState:
    """Keys and values of one batch: the prompt's, bound, and the suffixes of the current beams."""

    __slots__ = ("_alive", "binding", "suffix")

    def __init__(self, binding: ort.IOBinding, suffix: list[ort.OrtValue], alive: tuple):
        self.binding = binding
        self.suffix = suffix
        self._alive = alive


def open_session(path: Path, threads: int, device: str) -> ort.InferenceSession:
    """A session over one graph on "cpu" or "cuda". Raises ValueError with the file's name where it cannot be read."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Waiting threads that spin would take the cores from the other instances and from the beam step between two runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    providers = [*(["CUDAExecutionProvider"] if device == "cuda" else []), "CPUExecutionProvider"]
    try:
        return ort.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # ONNX Runtime's errors share no base class of their own
        raise ValueError(f"{path}: ONNX Runtime cannot load it: {str(error).strip()[:300]}") from None


def host(array: Any) -> np.ndarray:
    """A kernel's codes or parents as a NumPy array, whatever device they are on."""
    return np.asarray(array.cpu() if hasattr(array, "cpu") else array)
