"""One ONNX graph as a model of the server, for servers without the ONNX backend. See `trieton.retriever.bls`."""

from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils  # exists only inside the stub

from trieton.retriever.onnx import DEFAULT_THREADS, open_session


class TritonPythonModel:
    """Runs `model.onnx` of its version, tensors in and out under the graph's names."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the graph."""
        folder = Path(args["model_repository"]) / args["model_version"]
        self.session = open_session(folder / "model.onnx", DEFAULT_THREADS, "cpu")
        self.outputs = [output.name for output in self.session.get_outputs()]

    def execute(self, requests: list[Any]) -> list[Any]:
        """One run per request: who asks has made the batch."""
        responses = []
        for request in requests:
            arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            try:
                made = self.session.run(self.outputs, arrays)
            except Exception as error:  # ONNX Runtime's errors share no base class of their own
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error))))
                continue
            tensors = [pb_utils.Tensor(name, array) for name, array in zip(self.outputs, made, strict=True)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
