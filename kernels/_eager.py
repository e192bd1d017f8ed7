"""Says what is watching a call. The private torch names that this needs are here and nowhere else."""

from __future__ import annotations

import torch

__all__ = ["inside_transform", "plain_eager"]

# Checked with torch 2.11 to 2.13. A torch that lacks one of these names takes the dispatcher always: slower, as right.
_compiling = torch.compiler.is_compiling
try:
    import torch.autograd.forward_ad as _forward_ad

    _dispatch_modes = torch._C._len_torch_dispatch_stack
    _function_mode = torch._C._is_torch_function_mode_enabled
    _functorch_active = torch._C._are_functorch_transforms_active
    _jit_tracing = torch._C._is_tracing
    _key_included = torch._C._dispatch_tls_is_dispatch_key_included
    _PRE_DISPATCH = torch._C.DispatchKey.PreDispatch
    _forward_ad._current_level  # noqa: B018
    _KNOWN = True
except AttributeError:
    _KNOWN = False


def plain_eager() -> bool:
    """True when no trace, transform, mode or forward-mode derivative is watching operator calls.

    A kernel may then be called on plain tensors that need no gradient without going through ``torch.ops``: the
    dispatcher and the Python autograd wrapper cost several times what a small kernel does.
    """
    return (
        _KNOWN
        and not _compiling()
        and _dispatch_modes() == 0
        and not _functorch_active()
        and not _function_mode()
        and not _jit_tracing()
        and not _key_included(_PRE_DISPATCH)
        and _forward_ad._current_level < 0
    )


def inside_transform() -> bool:
    """True under ``torch.func`` transforms, which refuse the autograd wrapper that ``torch.library`` generates."""
    return _KNOWN and not _compiling() and _functorch_active()
