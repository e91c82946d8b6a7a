"""What the wrappers around kernels share."""


def factors(stride: int) -> tuple[int, int]:
    """Return ``(n, 16)`` for a stride of ``16 * n`` elements, ``(stride, 1)`` for any other.

    The first goes to a kernel as an argument, because torch may give a dimension of one entry any
    stride, and nothing should be compiled for that; the second is compiled in, and tells the
    compiler that rows begin where accesses of 16 bytes may.
    """
    return (stride // 16, 16) if stride % 16 == 0 else (stride, 1)
