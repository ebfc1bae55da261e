"""vLLM's own server with the plugin, as docs/vllm.md starts it, in a process of its own."""

import os
import signal
import socket
import subprocess
import sys

OPTIONS = [
    *("--served-model-name", "policy", "--host", "127.0.0.1", "--dtype", "float32"),
    *("--max-num-seqs", "64", "--kv-cache-memory-bytes", str(1 << 28), "--block-size", "32"),
    *("--enforce-eager", "--no-enable-chunked-prefill", "--skip-tokenizer-init"),
    *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
    *("--enable-scale-out", "--weight-transfer-config", '{"backend": "trinity"}'),
]
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


class VLLMServer:
    """A server at a port of its own, which may be killed and started again."""

    def __init__(self, folder, log, extension="tests.support.vllm_faults.FaultyWorker"):
        self._folder, self._log, self._extension = folder, log, extension
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start()

    def start(self):
        # Not `vllm serve`: the build for CPUs lacks the metadata that it reads.
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"),
            *("--model", str(self._folder), "--port", str(self._port), *OPTIONS),
            *("--worker-extension-cls", self._extension),
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **ENVIRONMENT},
            )

    def kill(self):
        """Kill all its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
