if __name__ != "graphrl.compiler":  # a second copy would register every op twice
    raise ImportError("import graphrl.compiler, not compiler")
