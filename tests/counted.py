"""Which operators run under a call: what is not copied is shown by what is not there."""

from torch.utils._python_dispatch import TorchDispatchMode


class Counted(TorchDispatchMode):
    """Names of the operators that ran, inside autograd too."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))
