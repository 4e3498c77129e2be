"""What all routes share: the engine's client, admission, metrics, and the model once it is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request

from model.tokenizer import Tokenizer
from scheduler.messages import Ready
from server.admission import Admission
from server.connections import Connections
from server.engine_client import EngineClient
from server.errors import NotFound, Unavailable
from server.key_file import ApiKey
from server.keys import KeyRing
from server.lease import Lease
from server.ledger import Ledger
from server.metrics import Metrics
from server.parsing.detect import AnswerFormats
from server.prompts import PromptBuilder
from server.record import RECORD
from server.sampling import Sampling
from server.settings import Settings
from server.sleep import Sleep
from server.store import ResponseStore
from server.structured.compiler import Structures
from server.tracing import Tracer
from server.version import VERSION

PAUSE_SECONDS = 10.0
"""While another engine is started, new requests wait for it so long; later ones are refused, and wait elsewhere."""
REASONS = {
    "asleep": "The server sleeps",
    "dead": "The engine has stopped",
    "draining": "The server is shutting down",
    "loading": "The model is being loaded",
    "restarting": "The engine is being restarted",
}
"""By state, why no request is taken."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything there is once the engine serves."""

    ready: Ready
    tokenizer: Tokenizer
    prompts: PromptBuilder
    sampling: Sampling
    formats: AnswerFormats
    structures: Structures

    def close(self) -> None:
        """Ends threads and processes."""
        self.prompts.close()
        self.structures.close()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as far as scheduling and the prefix cache care."""

    tenant: str
    salt: bytes
    """Requests of different salts share no cached block: other keys' prompts cannot be told from timing."""
    lease: Lease
    weight: float = 1.0
    """Share of the service that the tenant has, against other tenants' weights."""
    priority: int = -(2**63)
    """The least that its requests may have: they would pass all fairness with it."""


@dataclass(slots=True)
class Service:
    """One server. Its parts change only on the event loop's thread."""

    settings: Settings
    client: EngineClient
    admission: Admission
    metrics: Metrics
    names: tuple[str, ...]
    """Of the model: its own first, then aliases."""
    loaded: Loaded | None = None
    draining: bool = False
    sleep: Sleep | None = None
    """With --enable-sleep-mode."""
    tracer: Tracer | None = None
    clock: Callable[[], float] = time.monotonic
    responses: ResponseStore = field(default_factory=ResponseStore)
    ledger: Ledger = field(default_factory=Ledger)
    created: int = field(default_factory=lambda: int(time.time()))
    keys: KeyRing = field(init=False)
    connections: Connections = field(init=False)

    def __post_init__(self) -> None:
        self.keys = KeyRing(self.settings)
        self.connections = Connections(self.settings.max_connections, self.settings.send_timeout)

    @property
    def fingerprint(self) -> str:
        """Changes where the same request could give another text."""
        parts = ["octavo", VERSION]
        if self.loaded is not None:
            ready = self.loaded.ready
            weights = self.settings.quantization or ready.dtype
            parts += [ready.device, weights, f"kv-{ready.kv_cache_dtype}", ready.attention]
        return "-".join(parts)

    @property
    def state(self) -> str:
        """loading, ready, draining, asleep, restarting, stalled or dead."""
        if self.client.gone.is_set():
            return "dead"
        if self.draining:
            return "draining"
        if self.loaded is None:
            return "loading"
        if self.sleep is not None and self.sleep.on:
            return "asleep"
        if not self.client.serving:
            return "restarting"
        return "stalled" if self.client.stalled else "ready"

    def require(self) -> Loaded:
        """What a request needs. Raises Unavailable while there is none, or no more; a short pause it may wait out."""
        if self.sleep is not None and self.settings.wake_on_request and self.state == "asleep":
            self.sleep.wake()
        state = self.state
        waits = state == "restarting" and self.client.down_seconds < PAUSE_SECONDS
        if self.loaded is None or not (waits or state in ("ready", "stalled")):
            error = Unavailable(f"{REASONS[state]}; try again later.")
            if state in ("dead", "draining"):
                error.headers["Connection"] = "close"
            raise error
        return self.loaded

    def caller(self, http: Request, cache_salt: str | None, user: str) -> Caller:
        """From the key that `ApiKeys` found, else from what the request says."""
        lease: Lease = http.scope["state"]["lease"]
        key, salt = lease.key, (cache_salt or "").encode()
        if key is None:
            return Caller(user, salt, lease)
        return Caller(key.name, key.digest + salt, lease, key.weight, key.priority)

    @staticmethod
    def owner(http: Request) -> bytes:
        """Whose stored responses a request may see: those of its key; without keys, everybody's."""
        key: ApiKey | None = http.scope["state"].get("key")
        return b"" if key is None else key.digest

    def check_model(self, name: str | None) -> str:
        """The name under which to answer; no name means the only model. Raises NotFound."""
        name = self.names[0] if name is None else name
        if name not in self.names:
            raise NotFound(
                f"The model {name[:256]!a} does not exist; this server has {self.names[0]!a}.",
                param="model",
                code="model_not_found",
            )
        if (record := RECORD.get()) is not None:
            record.model = name
        return name


def service_of(http: Request) -> Service:
    service = http.app.state.service
    assert isinstance(service, Service)
    return service
