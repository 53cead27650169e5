"""For workers: how much an agreement asks of the rendezvous store."""

import torch.distributed as dist

from foundry_fp8.distributed.attendance import agree

METHODS = ("set", "get", "wait", "check", "add", "compare_set", "multi_get", "multi_set")


def requests():
    """How many this rank sends in one agreement, and the order in which it sends them."""
    dist.init_process_group("gloo")
    sent = []

    def counted(name, method):
        def call(*args):
            sent.append(name)
            return method(*args)

        return call

    for name in METHODS:
        setattr(dist.PrefixStore, name, counted(name, getattr(dist.PrefixStore, name)))
    agree("a key", "alike")
    found = list(sent)
    dist.barrier()
    return found
