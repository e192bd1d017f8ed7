if __name__ != "graphrl.losses":  # a second copy would register every op twice
    raise ImportError("import graphrl.losses, not losses")
