"""The two names of numpy that the bridge uses, over a memoryview."""
int32 = "i"


def frombuffer(data, dtype):
    return memoryview(data).cast(dtype)
