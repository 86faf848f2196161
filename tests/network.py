"""What stands between a client and a server in tests: relays, proxies, and servers that say what a test wants."""

import contextlib
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc


class Relay:
    """A port that forwards to a server and can be shut, or go silent on the connections it has.

    Args:
        target: host:port of the server.
        proxy: be an HTTP proxy: wait for a CONNECT, to whatever name, and note it in `connects`.
    """

    def __init__(self, target: str, *, proxy: bool = False):
        host, _, port = target.rpartition(":")
        self.target = (host, int(port))
        self.proxy = proxy
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"127.0.0.1:{self.port}"
        self.connects: list[str] = []
        self.connections: list[socket.socket] = []
        self.mute: set[socket.socket] = set()  # what comes from them is dropped, and they stay open
        self.listener: socket.socket | None = None

    def open(self) -> "Relay":
        self.listener = socket.create_server(("127.0.0.1", self.port), reuse_port=False)
        threading.Thread(target=self._accept, args=(self.listener,), daemon=True).start()
        return self

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                guest, _ = listener.accept()
                if self.proxy:
                    with guest.makefile("rb") as lines:
                        self.connects.append(lines.readline().decode().split()[1])
                        while lines.readline().strip():
                            pass
                    guest.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                inside = socket.create_connection(self.target)
            except OSError:
                return
            self.connections += [guest, inside]
            for a, b in ((guest, inside), (inside, guest)):
                threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if source not in self.mute:
                    sink.sendall(data)
        for end in (source, sink):  # close alone would not wake the other thread that waits in recv
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def silence(self) -> None:
        """Forget all connections without telling anybody; new ones are served."""
        self.mute |= set(self.connections)

    def shut(self) -> None:
        if self.listener is not None:
            self.listener.shutdown(socket.SHUT_RDWR)
            self.listener.close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.connections.clear()

    def __enter__(self) -> "Relay":
        return self.open()

    def __exit__(self, *exception: object) -> None:
        self.shut()


class TinyServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Speaks the server's gRPC protocol, answers every search with item 7, and counts."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        self.searches = 0
        self.entered, self.goes_on = threading.Event(), threading.Event()
        self.goes_on.set()
        self.server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"{host}:{port}")
        self.server.start()

    def ModelConfig(self, request, context):
        answer = service_pb2.ModelConfigResponse()
        answer.config.name, answer.config.max_batch_size = request.name, 4
        answer.config.input.add(name="history", data_type="TYPE_INT64")
        return answer

    def ModelInfer(self, request, context):
        self.searches += 1
        self.entered.set()
        self.goes_on.wait(30)
        answer = service_pb2.ModelInferResponse(model_version="1")
        for name, datatype, shape, raw in (
            ("item_ids", "INT64", [1, 1], struct.pack("<q", 7)),
            ("scores", "FP32", [1, 1], struct.pack("<f", -1)),
            ("codes", "INT32", [1, 1, 1], struct.pack("<i", 0)),
            ("num_results", "INT32", [1, 1], struct.pack("<i", 1)),
            ("num_unknown", "INT32", [1, 1], struct.pack("<i", 0)),
            ("certified", "BOOL", [1, 1], b"\1"),
            ("bundle_id", "BYTES", [1, 1], struct.pack("<I", 4) + b"tiny"),
        ):
            answer.outputs.add(name=name, datatype=datatype, shape=shape)
            answer.raw_output_contents.append(raw)
        return answer

    def __enter__(self) -> "TinyServer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.goes_on.set()
        self.server.stop(None).wait()
