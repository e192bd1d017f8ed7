if __name__ != "graphrl.kernels":  # a second copy would register every op twice
    raise ImportError("import graphrl.kernels, not kernels")
