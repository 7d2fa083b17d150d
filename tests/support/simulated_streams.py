"""A GPU's streams without a GPU: queues of work that a test runs in any order that their waits allow."""

import torch
from torch.overrides import TorchFunctionMode


class Queue:
    """A stream whose work waits until the test runs it, in any order that its waits for others allow."""

    device = torch.device("cpu")

    def __init__(self):
        self.work = []

    def wait_event(self, event):
        if event.recorded is not None:  # CUDA does not wait for an event that nobody has recorded
            self.work.append(("wait", event.recorded))

    def wait_stream(self, other):
        event = Event()
        event.record(other)
        self.wait_event(event)

    def runs(self, done):
        """Do the first piece of work, if what it waits for is done."""
        kind, what = self.work[0]
        if kind == "wait" and what not in done:
            return False
        if kind == "record":
            done.add(what)
        elif kind == "do":
            what()
        del self.work[0]
        return True


class Noted(TorchFunctionMode):
    """Notes into a list the queue that a copy is made in, the kind of device that it goes to, and if the host goes on.

    It makes no copy.
    """

    def __init__(self, queue, copies):
        super().__init__()
        self.queue, self.copies = queue, copies

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function is not torch.Tensor.copy_:
            return function(*arguments, **(options or {}))
        self.copies.append((self.queue, arguments[0].device.type, options["non_blocking"]))


class Event:
    recorded = None

    def record(self, queue):
        self.recorded = object()
        queue.work.append(("record", self.recorded))


class Deferred(TorchFunctionMode):
    """Puts copies into a queue in place of making them."""

    def __init__(self, queue):
        super().__init__()
        self.queue = queue

    def __torch_function__(self, function, types, arguments=(), options=None):
        if function is not torch.Tensor.copy_:
            return function(*arguments, **(options or {}))
        self.queue.work.append(("do", lambda: arguments[0].copy_(arguments[1])))
