"""The declaration of an exported retriever, and the engines that run its graphs."""

import os

# ONNX Runtime 1.32 sends figures about models and machines to its makers unless told otherwise, and keeps a file for it
# among the temporary ones. A server tells nobody anything by itself. The import reads this, so it is set before.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
