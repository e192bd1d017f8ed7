if __name__ != "graphrl.models":  # a second copy would register every op twice
    raise ImportError("import graphrl.models, not models")
