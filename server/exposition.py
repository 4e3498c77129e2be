"""Names for what is counted: one collector, read when somebody scrapes, so that no gauge can be stale.

Clean names begin with `octavo_` and pass `promtool check metrics`. The same values stand under vLLM's names for the
dashboards, autoscalers and gateways that look for those. Labels come from closed sets, and series exist from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from scheduler.messages import EngineStats
from server.metrics import FINISH_REASONS, Histogram
from server.service import Service
from server.version import VERSION

Labels = Mapping[str, str]
Samples = list[tuple[Labels, float]]

IDLE = EngineStats(**dict.fromkeys(EngineStats.__struct_fields__, 0))
"""Of an engine that has not spoken yet, or no longer lives: nothing runs there."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A counter or gauge under its clean name, and under vLLM's where that exists."""

    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    help: str
    samples: Samples
    alias: str | None = None


@dataclass(frozen=True, slots=True)
class Distribution:
    name: str
    help: str
    histogram: Histogram
    alias: str


class ServerCollector(Collector):
    """Everything about one service."""

    def __init__(self, service: Service, aliases: bool) -> None:
        self._service = service
        self._aliases = aliases

    def collect(self) -> Iterator[Metric]:
        model = {"model_name": self._service.names[0]}
        alias = {**model, "engine": "0"}
        for scalar in (*self._gauges(), *self._counters()):
            yield _family(scalar.kind, scalar.name, scalar.help, scalar.samples)
            if self._aliases and scalar.alias is not None:
                samples: Samples = [({**alias, **labels}, value) for labels, value in scalar.samples]
                yield _family(scalar.kind, scalar.alias, scalar.help, samples)
        for shown in self._distributions():
            yield _histogram(shown.name, shown.help, shown.histogram, {})
            if self._aliases:
                yield _histogram(shown.alias, shown.help, shown.histogram, alias)
        if self._aliases:
            yield from self._vllm(model, alias)

    def _gauges(self) -> Iterator[Scalar]:
        service = self._service
        stats = service.client.stats or IDLE
        state = service.state
        loaded = service.loaded

        def gauge(name: str, help: str, value: float | Samples, alias: str | None = None) -> Scalar:
            samples: Samples = value if isinstance(value, list) else [({}, value)]
            return Scalar(GaugeMetricFamily, "octavo_" + name, help, samples, alias)

        used = stats.blocks_active / stats.blocks_total if stats.blocks_total else 0.0
        blocks = {"free": stats.blocks_free, "cached": stats.blocks_cached, "active": stats.blocks_active}
        yield gauge("requests_running", "Sequences that run.", stats.running, "vllm:num_requests_running")
        waiting = stats.waiting + service.client.held
        yield gauge("requests_waiting", "Sequences that wait.", waiting, "vllm:num_requests_waiting")
        yield gauge("requests_in_flight", "Requests between admission and their end.", service.admission.requests)
        yield gauge("queued_prompt_tokens", "Prompt tokens that wait.", stats.waiting_tokens)
        yield gauge(
            "kv_blocks",
            "Blocks of the KV pool: free, cached (free, but findable by prefix), active.",
            [({"state": name}, count) for name, count in blocks.items()],
        )
        yield gauge("kv_usage_ratio", "Share of the KV pool that is active.", used, "vllm:kv_cache_usage_perc")
        yield gauge("kv_active_tokens", "Tokens held in active blocks, once a group of layers.", stats.tokens_active)
        tier = {"used": stats.tier_bytes_used, "free": stats.tier_bytes_total - stats.tier_bytes_used}
        by_state: Samples = [({"state": name}, count) for name, count in tier.items()]
        yield gauge("kv_tier_bytes", "Bytes of the tier behind the KV pool: used, free.", by_state)
        yield gauge("connections", "Open connections.", service.connections.count)
        yield gauge("engine_up", "Whether the engine serves.", float(state in ("ready", "draining")))
        asleep = float(state == "asleep")
        yield gauge("engine_asleep", "Whether the engine was put to sleep.", asleep)
        yield gauge("step_stalled", "Whether the engine is silent with work pending.", float(state == "stalled"))
        yield gauge("build_info", "The version.", [({"version": VERSION}, 1)])
        if loaded is not None:
            ready = loaded.ready
            names = ("device", "dtype", "kv_cache_dtype", "attention")
            info = {"model_name": service.names[0], **{name: str(getattr(ready, name)) for name in names}}
            yield gauge("model_info", "What is served, and how.", [(info, 1)])
            yield gauge("model_weight_bytes", "Size of the weights.", ready.weight_bytes)
            if ready.kv_divergence is not None and ready.kv_agreement is not None:
                help = "Of the KV format from 16 bits at the start: mean KL of the next token."
                yield gauge("kv_divergence_nats", help, ready.kv_divergence)
                help = "Share of places with the same likeliest token as with 16 bits, at the start."
                yield gauge("kv_agreement_ratio", help, ready.kv_agreement)
            yield gauge("kv_pool_bytes", "Size of the KV pool.", ready.kv_bytes)
            yield gauge("model_load_seconds", "How long loading took.", ready.load_seconds)

    def _counters(self) -> Iterator[Scalar]:
        service = self._service
        stats = service.client.counters or IDLE
        metrics = service.metrics

        def counter(name: str, help: str, value: float | Samples, alias: str | None = None) -> Scalar:
            samples: Samples = value if isinstance(value, list) else [({}, value)]
            return Scalar(CounterMetricFamily, "octavo_" + name, help, samples, alias)

        by_end: Samples = [
            ({"endpoint": endpoint, "finish_reason": reason}, count)
            for (endpoint, reason), count in metrics.finished.items()
        ]
        rejected: Samples = [({"reason": reason}, count) for reason, count in service.admission.rejected.items()]
        http: Samples = [
            ({"route": route, "method": method, "status": str(status)}, count)
            for (route, method, status), count in sorted(metrics.http.items())
        ]
        cached = metrics.cached_tokens
        by_source: Samples = [
            ({"source": "computed"}, metrics.prompt_tokens - cached),
            ({"source": "cached"}, cached),
        ]
        yield counter("requests", "Requests that ended, by endpoint and reason.", by_end)
        yield counter("rejected", "Requests refused with 429, by reason.", rejected)
        yield counter("client_disconnects", "Requests whose client left.", metrics.disconnects)
        dropped: Samples = [({"reason": reason}, count) for reason, count in service.connections.dropped.items()]
        yield counter("connections_dropped", "Connections closed or refused, by reason.", dropped)
        yield counter("http_requests", "HTTP requests by route, method and status.", http)
        yield counter("prompt_tokens", "Prompt tokens of started requests, by where they came from.", by_source)
        yield counter("generation_tokens", "Generated tokens.", metrics.generation_tokens, "vllm:generation_tokens")
        yield counter("preemptions", "Sequences that lost their blocks.", stats.preemptions, "vllm:num_preemptions")
        yield counter(
            "prefix_cache_queried_tokens",
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_queried_tokens,
            "vllm:prefix_cache_queries",
        )
        yield counter(
            "prefix_cache_hit_tokens",
            "Prompt tokens found in the prefix cache.",
            stats.prefix_hit_tokens,
            "vllm:prefix_cache_hits",
        )
        yield counter("kv_tier_hits", "Sequences that began with tokens from the KV tier.", stats.tier_restores)
        by_fate: Samples = [
            ({"event": "restored"}, stats.tier_restored_tokens),
            ({"event": "stored"}, stats.tier_stored_tokens),
            ({"event": "refused"}, stats.tier_refused_tokens),
        ]
        yield counter("kv_tier_tokens", "Tokens moved by the KV tier; refused: not what had been stored.", by_fate)
        drafts = "Rows of a step that had a draft, guessed tokens to verify."
        yield counter("drafts", drafts, stats.drafts, "vllm:spec_decode_num_drafts")
        yield counter("draft_tokens", "Guessed tokens.", stats.drafted_tokens, "vllm:spec_decode_num_draft_tokens")
        yield counter(
            "accepted_draft_tokens",
            "Guessed tokens that were right.",
            stats.accepted_tokens,
            "vllm:spec_decode_num_accepted_tokens",
        )
        yield counter("computed_prompt_tokens", "Prompt tokens computed, again ones included.", stats.computed_tokens)
        failed: Samples = [
            ({"reason": "raised"}, stats.failed_raised),
            ({"reason": "memory"}, stats.failed_memory),
            ({"reason": "logits"}, stats.failed_logits),
            ({"reason": "grammar"}, stats.failed_grammar),
        ]
        yield counter("failed_sequences", "Sequences that the engine gave up, alone, by reason.", failed)
        yield counter("steps", "Steps of the engine.", stats.steps)
        restarts: Samples = [({"reason": reason}, count) for reason, count in metrics.engine_restarts.items()]
        yield counter("engine_restarts", "Engines started in the place of one that ended, by why it did.", restarts)

    def _distributions(self) -> Iterator[Distribution]:
        m = self._service.metrics
        for name, alias, help, histogram in (
            ("time_to_first_token_seconds", None, "From arrival to the first token.", m.first_token),
            ("inter_token_latency_seconds", None, "Between two steps with a token of the request.", m.inter_token),
            ("time_per_output_token_seconds", "request_time_per_output_token_seconds", "Per request.", m.per_token),
            ("request_latency_seconds", "e2e_request_latency_seconds", "From arrival to the end.", m.e2e),
            ("queue_time_seconds", "request_queue_time_seconds", "From arrival to the first step.", m.queue),
            ("inference_time_seconds", "request_inference_time_seconds", "First step to last token.", m.inference),
            ("prefill_time_seconds", "request_prefill_time_seconds", "First step to first token.", m.prefill),
            ("decode_time_seconds", "request_decode_time_seconds", "First to last token.", m.decode),
            ("request_prompt_tokens", None, "Prompt tokens of a request.", m.request_prompt_tokens),
            ("request_generation_tokens", None, "Generated tokens of a request.", m.request_generation_tokens),
            ("request_max_tokens", "request_params_max_tokens", "Limit of a request.", m.request_max_tokens),
            ("request_choices", "request_params_n", "Sequences of a request.", m.request_n),
            ("step_tokens", "iteration_tokens_total", "Tokens computed in a step.", m.step_tokens),
        ):
            yield Distribution("octavo_" + name, help, histogram, "vllm:" + (alias or name))
        yield Distribution("octavo_step_seconds", "Length of a step.", m.step_seconds, "vllm:step_duration_seconds")

    def _vllm(self, model: Labels, alias: Labels) -> Iterator[Metric]:
        """What vLLM labels otherwise than we do."""
        service, metrics = self._service, self._service.metrics
        ends: Samples = [
            ({**alias, "finished_reason": reason}, sum(n for (_, r), n in metrics.finished.items() if r == reason))
            for reason in FINISH_REASONS
        ]
        rejected: Samples = [({**model, "reason": r}, n) for r, n in service.admission.rejected.items()]
        yield _family(CounterMetricFamily, "vllm:request_success", "Requests that ended.", ends)
        yield _family(CounterMetricFamily, "vllm:admission_rejections", "Requests refused.", rejected)
        yield _family(CounterMetricFamily, "vllm:prompt_tokens", "Prompt tokens.", [(alias, metrics.prompt_tokens)])
        yield _family(
            CounterMetricFamily, "vllm:prompt_tokens_cached", "Of those, cached.", [(alias, metrics.cached_tokens)]
        )
        if service.loaded is not None:
            ready = service.loaded.ready
            info = {
                **alias,
                "block_size": str(ready.block_size),
                "num_gpu_blocks": str(ready.num_blocks),
                "cache_dtype": ready.kv_cache_dtype,
                "enable_prefix_caching": str(service.settings.enable_prefix_caching),
            }
            yield _family(GaugeMetricFamily, "vllm:cache_config_info", "The KV pool.", [(info, 1)])


def _family(
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily], name: str, help: str, samples: Samples
) -> Metric:
    names = list(samples[0][0]) if samples else []
    family = kind(name, help, labels=names)
    for labels, value in samples:
        family.add_metric([labels[key] for key in names], value)
    return family


def _histogram(name: str, help: str, histogram: Histogram, labels: Labels) -> Metric:
    family = HistogramMetricFamily(name, help, labels=list(labels))
    buckets, below = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), below))
    family.add_metric(list(labels.values()), buckets, histogram.total)
    return family


def make_registry(service: Service) -> CollectorRegistry:
    """All collectors of this process; made once per server, so that tests can make many."""
    registry = CollectorRegistry()
    registry.register(ServerCollector(service, aliases=service.settings.metrics_alias == "vllm"))
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
