"""The layers of the box as one plan: what this host gives, and the order in which zygote and children put them on.

The plan is made once, by trying (probe.py), in the zygote. `enter_zygote` is irreversible; `enter_child` ends with the
system-call filter, after which no layer can be changed.
"""

from __future__ import annotations

import os

from sandbox.layers import kernel, landlock, limits, namespaces, seccomp


class Plan:
    """Which layers are on. probe.find fills in what the host gives."""

    def __init__(self, readable: list[str], scratch_base: str, memory_bytes: int, tasks: int):
        self.readable = readable  # folders of the interpreter and its libraries
        self.scratch_base = scratch_base  # where scratch folders are made when there are no namespaces
        self.memory_bytes = memory_bytes  # tool.memory_mb
        self.tasks = tasks  # processes and threads of the sandbox's user, zygote and spares included
        self.namespaces = self.seccomp = False
        self.as_root = False  # the namespaces are made with root's rights, not through a user namespace
        self.landlock = 0  # its ABI
        self.identity: int | None = None  # the uid to become where namespaces do not do that; None: stay
        self.unprivileged = self.limits = True  # capabilities are dropped; resource limits are set
        self.missing: dict[str, str] = {}  # layer: why it is off


class Isolation:
    """Puts the plan on: first the zygote, then each of its children."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self._filter = seccomp.SystemCallFilter(plan.namespaces) if plan.seccomp else None
        self._ruleset = -1
        self._address_space = 0

    def enter_zygote(self) -> None:
        """The zygote's own part, before it imports anything else. Raises OSError."""
        plan = self.plan
        if plan.namespaces:
            namespaces.enter(plan.readable, plan.as_root)
            os.environ.update(dict.fromkeys(limits.SCRATCH_VARIABLES, namespaces.SCRATCH))
            if plan.landlock:
                changeable = [namespaces.BOX, "/dev/null"]
                self._ruleset = landlock.ruleset(["/"], changeable, plan.landlock)
        elif plan.identity is not None:
            namespaces.become(plan.identity)
        if kernel.SUPPORTED:
            kernel.die_with_parent()

    def settle(self, virtual_bytes: int) -> None:
        """Fixes the address space of children: the zygote's own, now that everything is imported, and the limit."""
        self._address_space = virtual_bytes + self.plan.memory_bytes

    def enter_child(self, number: int) -> None:
        """Shuts a forked child in, descriptors excepted. Raises OSError."""
        plan = self.plan
        if plan.namespaces:
            namespaces.mount_scratch()
        else:
            scratch = os.path.join(plan.scratch_base, str(number))
            os.mkdir(scratch, 0o700)
            os.chdir(scratch)
            os.environ.update(dict.fromkeys(limits.SCRATCH_VARIABLES, scratch))
        if plan.limits:
            # Without the filter nothing else keeps a program from starting processes: then threads go as well.
            limits.apply(self._address_space, plan.tasks if plan.seccomp else 0)
        if not kernel.SUPPORTED:
            return
        kernel.no_new_privileges()
        if plan.landlock:
            ruleset = self._ruleset
            if not plan.namespaces:
                devices = ["/dev/null", "/dev/zero", "/dev/urandom"]
                ruleset = landlock.ruleset([*plan.readable, *devices], [scratch, "/dev/null"], plan.landlock)
            landlock.restrict(ruleset)
        if plan.unprivileged:
            kernel.drop_capabilities()
        if not plan.namespaces:
            kernel.die_with_parent()
        kernel.set_dumpable(0)
        if self._filter is not None:
            self._filter.install(os.getpid())
