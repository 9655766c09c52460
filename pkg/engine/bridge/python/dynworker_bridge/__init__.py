"""Bridge between a worker process and TensorRT-LLM's Python API.

    main      start, load, serve; the order of events in a process's life
    loading   the import and the build of the engine, with signs of life
    channel   frames on the socket to the worker
    engine    the only module that touches tensorrt_llm: build it, call it, ask it
    probes    what the installed build can do
    results   one request from the engine's result object to output records
    serve     the event loop's side: messages in, records out, questions answered
    ending    every way the process ends, each of them bounded in time
    watch     signals, the parent's death, a fatal error that no request was told of
    processes the operating system: process table, parent, signals

The bridge checks nothing that the worker has checked already, and decides nothing: it calls
what it is told to call and reports what came back.
"""
