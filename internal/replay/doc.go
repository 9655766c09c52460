// Package replay holds the whole worker to recordings of the worker that it replaces.
//
// Its tests start the worker as its binary does (command line, etcd, NATS, the TensorRT-LLM bridge as a subprocess on a stand-in for the tensorrt_llm package), send it the recorded requests as the frontend does, and compare what the
// engine was asked to do and what came back on the wire. testdata/README.md says where the recordings are from and when two runs are equal; testdata/differences.yaml lists every place in which ours differs on purpose.
//
// There is nothing to import.
package replay
