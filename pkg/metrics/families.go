package metrics

import "slices"

// Family is a family of metrics, that is, everything of one name.
type Family struct {
	Name   string
	Type   string   // counter, gauge or histogram
	Labels []string // sorted
	Help   string

	vars    []string  // labels that a method gives values to, in this order
	buckets []float64 // of a histogram, in the unit of its name
}

// Labels that several families have.
const (
	labelNamespace = "dynamo_namespace"
	labelComponent = "dynamo_component"
	labelEndpoint  = "dynamo_endpoint"
	labelWorker    = "worker_id"
	labelModel     = "model"
	labelModelName = "model_name"
	labelRank      = "dp_rank"
)

// The types.
const (
	typeCounter   = "counter"
	typeGauge     = "gauge"
	typeHistogram = "histogram"
)

// component is a family that carries the labels of a served endpoint; more are
// those of its own.
func component(name, typ, help string, buckets []float64, more ...string) Family {
	vars := append([]string{labelEndpoint, labelModel, labelModelName}, more...)
	labels := append([]string{labelNamespace, labelComponent, labelWorker}, vars...)
	slices.Sort(labels)
	return Family{Name: name, Type: typ, Labels: labels, Help: help, vars: vars, buckets: buckets}
}

// plain is a family with no labels but its own.
func plain(name, typ, help string, buckets []float64, labels ...string) Family {
	sorted := slices.Sorted(slices.Values(labels))
	return Family{Name: name, Type: typ, Labels: sorted, Help: help, vars: labels, buckets: buckets}
}

// Families of Dynamo 1.6.1's workers, with its buckets.
var (
	famRequests = component("dynamo_component_requests_total", typeCounter,
		"Requests that were taken up, whatever became of them.", nil)
	famDuration = component("dynamo_component_request_duration_seconds", typeHistogram,
		"Time from taking a request up to the end of its handler.",
		[]float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600})
	famInflight = component("dynamo_component_inflight_requests", typeGauge,
		"Requests that are being handled.", nil)
	famRequestBytes = component("dynamo_component_request_bytes_total", typeCounter,
		"Bytes of the messages that brought requests.", nil)
	famResponseBytes = component("dynamo_component_response_bytes_total", typeCounter,
		"Bytes of answers, without frame heads.", nil)
	famErrors = component("dynamo_component_errors_total", typeCounter,
		"Requests that failed, by where: deserialization, invalid_message, response_stream, generate, serialization, publish_response, publish_final.", nil, "error_type")
	famCancellations = component("dynamo_component_cancellation_total", typeCounter,
		"Requests that ended because the caller went away.", nil)
	famUptime = Family{Name: "dynamo_component_uptime_seconds", Type: typeGauge, Labels: []string{labelWorker},
		Help: "Time since the worker started."}
	famLoadTime = plain("dynamo_component_model_load_time_seconds", typeGauge,
		"Time until the model could be used.", nil, labelComponent, labelModel)
	famTotalBlocks = plain("dynamo_component_total_blocks", typeGauge,
		"KV blocks of a rank.", nil, labelComponent, labelRank, labelModel)
	famCacheUsage = plain("dynamo_component_gpu_cache_usage_percent", typeGauge,
		"Part of a rank's KV blocks that is in use, from 0 to 1 (the name is Dynamo's).", nil, labelComponent, labelRank, labelModel)

	famTransit = plain("dynamo_work_handler_network_transit_seconds", typeHistogram,
		"Time from the frontend's sending a request to its arrival, by the clocks of the two machines; not observed when the frontend does not tell.",
		[]float64{.0001, .0005, .001, .005, .01, .05, .1, .5, 1})
	famFirstResponse = plain("dynamo_work_handler_time_to_first_response_seconds", typeHistogram,
		"Time from taking a request up to telling the frontend that it is accepted.",
		[]float64{.001, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60})
	famQueueDepth = plain("dynamo_work_handler_queue_depth", typeGauge,
		"Requests that wait for a slot.", nil)
	famQueueCapacity = plain("dynamo_work_handler_queue_capacity", typeGauge,
		"Requests that may wait for a slot.", nil)
	famEnqueueRejected = plain("dynamo_work_handler_enqueue_rejected_total", typeCounter,
		"Requests refused because the worker cannot serve: it stops, or its engine is gone.", nil)
	famPermitWait = plain("dynamo_work_handler_permit_wait_seconds", typeHistogram,
		"Time that a request waited for a slot.",
		[]float64{.0001, .001, .01, .05, .1, .5, 1, 5, 10, 30, 60})
	famPoolActive = plain("dynamo_work_handler_pool_active_tasks", typeGauge,
		"Requests that have a slot.", nil)
	famPoolCapacity = plain("dynamo_work_handler_pool_capacity", typeGauge,
		"Slots; 0 when requests are not limited.", nil)
	famRejected = plain("dynamo_rejection_request_total", typeCounter,
		"Requests refused because all slots and places to wait were taken.", nil)
	famEngineRequests = plain("dynamo_engine_request", typeGauge,
		"Requests that the engine works on.", nil)
	famRequestQueue = plain("dynamo_request_queue", typeGauge,
		"Requests that wait for the engine.", nil)
)

// Families of this worker.
var (
	famBuildInfo = plain("dynworker_build_info", typeGauge,
		"1, with the version of the worker and of Go.", nil, "version", "go_version")
	famReady = plain("dynworker_ready", typeGauge,
		"1 while /health says ready.", nil)
	famLostLogLines = plain("dynworker_log_lines_lost_total", typeCounter,
		"Log lines that stderr did not take, because it was full, slow or broken.", nil)
	famHandovers = plain("dynworker_handovers_total", typeCounter,
		"Prompts that were handed over to decode workers.", nil)
	famDeferredAborts = plain("dynworker_deferred_aborts_total", typeCounter,
		"Aborts that waited for the transfer of KV blocks, by how that ended: in_time, forced (the time was over), moot (the engine had ended), crowded (too many waited).", nil, "outcome")
	famEngineUp = plain("dynworker_engine_up", typeGauge,
		"1 while an engine is ready.", nil)
	famEngineStarts = plain("dynworker_engine_starts_total", typeCounter,
		"Engines that became ready.", nil)
	famEngineFailures = plain("dynworker_engine_failures_total", typeCounter,
		"Engines that failed while they served or while they started, by what found it out: exit (the process ended), rank (another process of the engine ended), fatal (it said so), protocol (it wrote nonsense), failures (too many requests failed in it), stall (requests in flight and no output), health (it says that it is ill, or nothing), canary (the worker's own requests fail), load (it did not become ready), mismatch (it came back other than it was).", nil, "detector")
	famEngineRestarts = plain("dynworker_engine_restarts_total", typeCounter,
		"Engines that were started again and serve, by what had found out the failure before.", nil, "detector")
	famEngineServing = plain("dynworker_engine_serving_since_seconds", typeGauge,
		"When the present engine began to serve, in seconds since 1970; 0 while there is none.", nil)
	famEngineFailed = plain("dynworker_engine_failed_at_seconds", typeGauge,
		"When an engine last failed, in seconds since 1970; 0 when none has.", nil)
	famHeldRequests = plain("dynworker_engine_held_requests", typeGauge,
		"Prefilled requests whose KV cache the engine holds until a decode engine has taken it; 0 where the engine does not tell (TensorRT-LLM does not).", nil)
	famHeldBlocks = plain("dynworker_engine_held_blocks", typeGauge,
		"Blocks of these requests, over all ranks.", nil)
	famStreamStalls = plain("dynworker_engine_stream_stalls_total", typeCounter,
		"Requests that were taken from an engine which gave nothing for them while it lived.", nil)
	famSuspects = plain("dynworker_suspect_requests_total", typeCounter,
		"Requests that were answered with a lasting error because engines failed with them in flight.", nil)
	famEngineOverran = plain("dynworker_engine_overran_total", typeCounter,
		"Requests for which the engine sent more tokens than it was asked for; the rest was cut off.", nil)
	famTokens = plain("dynworker_tokens_total", typeCounter,
		"Generated tokens that were passed on.", nil)
	famPromptTokens = plain("dynworker_prompt_tokens_total", typeCounter,
		"Tokens of prompts that the engine took up.", nil)
	famCachedTokens = plain("dynworker_cached_tokens_total", typeCounter,
		"Tokens of prompts that the engine found in its KV cache.", nil)
	famFrames = plain("dynworker_frames_total", typeCounter,
		"Chunks of answers that were passed on.", nil)
	famTokensPerFrame = plain("dynworker_tokens_per_frame", typeHistogram,
		"Tokens in a chunk that has any; more than 1 when several were ready at once.", tokenBounds[:])
	famFirstToken = plain("dynworker_time_to_first_token_seconds", typeHistogram,
		"Time from taking a request up to its first chunk.",
		[]float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300})
	famPhaseTook = plain("dynworker_request_phase_seconds", typeHistogram,
		"Time that a request spent in a phase: accept (calling the frontend back), queue (for a slot), prefill (in the engine, until its first output), transfer (the same on a decode worker, which fetches KV blocks in it), decode (from the first output to the end).",
		[]float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600}, "phase")
	famPhaseIn = plain("dynworker_requests_in_phase", typeGauge,
		"Requests that are in a phase now.", nil, "phase")
	famPhaseStuck = plain("dynworker_slow_requests_total", typeCounter,
		"Requests that made no progress for log.slow_request, by the phase in which they were stuck. A request can count in more than one phase.", nil, "phase")
	famRequestErrors = plain("dynworker_request_errors_total", typeCounter,
		"The same errors as dynamo_component_errors_total, by how far the request had come: before_accept, before_first_token, mid_stream.", nil, "phase", "error_type")
	famCancels = plain("dynworker_cancels_total", typeCounter,
		"Requests that ended early, by cause: stop and kill (the frontend said so), reset (its connection broke), protocol (it sent nonsense), write (it stopped reading), shutdown (the worker stopped).", nil, "cause")
	famRefused = plain("dynworker_refused_requests_total", typeCounter,
		"Requests that were refused before they were taken up, by reason: overloaded, unavailable.", nil, "reason")
	famStreams = plain("dynworker_streams_open", typeGauge,
		"Response streams that are connected to a frontend.", nil)
	famAffinityDecisions = plain("dynworker_affinity_decisions_total", typeCounter,
		"Requests by why they were placed as they were.", nil, "reason")
	famAffinityDisagreement = plain("dynworker_affinity_disagreement", typeGauge,
		"1 when the conversation-affinity switch and the engine's configuration disagree and the worker serves all the same.", nil)
	famIngressEvents = plain("dynworker_ingress_events_total", typeCounter,
		"What befell the request plane outside of any request, by plane and event; the event dropped counts messages lost to a slow consumer.", nil, "plane", "event")
	famRegistered = plain("dynworker_etcd_registered", typeGauge,
		"1 while the worker's records are in etcd.", nil)
	famLeaseLosses = plain("dynworker_etcd_lease_losses_total", typeCounter,
		"Leases that were lost.", nil)
	famReregistrations = plain("dynworker_etcd_reregistrations_total", typeCounter,
		"Times that records had to be put back into etcd.", nil)
	famNATSHealthy = plain("dynworker_nats_healthy", typeGauge,
		"1 while messages come back over NATS.", nil)
	famNATSReconnects = plain("dynworker_nats_reconnects_total", typeCounter,
		"Returns of the NATS connection after a loss.", nil)
	famModelFiles = plain("dynworker_model_file_gets_total", typeCounter,
		"Model files that were fetched, by name.", nil, "file")
)

// Families lists every family of this package, in the order of their names.
// The collectors of the Go runtime (go_*) and of the process (process_*) come
// with the client library and are not among them.
func Families() []Family {
	b := newBuilder()
	newWorker(b, Options{})
	slices.SortFunc(b.families, func(x, y Family) int {
		if x.Name < y.Name {
			return -1
		}
		return 1
	})
	return b.families
}
