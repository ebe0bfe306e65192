"""Large blocks below the device: `blocks_per_large` small ones of a prefix that move as one.

    prefix      |0 1 2 3|4 5 6 7|8 9     a long cold prefix: two large blocks, and its edge
    device       small blocks, wherever they were free; block tables know only these
    host         a large block is a run of neighbours (`RunPool`), the edge lies in small blocks
    disk         an entry per large block, an entry per small block of the edge

A large block is demoted as a whole when the first of its small ones is evicted, which is the last
of the run; when the others are evicted, nothing is left to copy. At the end of a prefix, and where
two prefixes are known to branch, blocks stay small, because on the disk a large one is found only
by prompts that continue in the same way. On the host each of its small ones is found by its own
name.

It is off by default, because `python -m minikv bench tiers --only large` shows no gain in time on a
CPU with SQLite: the hits are the same, and moves take as long. With 4 blocks per large one the disk
has a third of the entries; with 8 or 16 it has more, because prefixes branch within more of the
large ones. It is meant for stores where each entry costs something: files, an object store,
requests over a network.
"""

import hashlib
from collections.abc import Hashable
from collections.abc import Sequence as Seq
from typing import Any

from minikv.paged import KVStore
from minikv.tiers import entry
from minikv.tiers.blocks import read_block, write_block
from minikv.tiers.host import HostPool
from minikv.tiers.names import Name, block_names, root_name
from minikv.tiers.runs import RunPool
from minikv.tiers.store import Unpack
from minikv.tiers.tiers import Returning, Tiers

Chunk = tuple[int, ...]  # the device's blocks of a large block, in order


def large_name(last: Name, length: int) -> Name:
    """The name of the large block that ends with the small one `last`."""
    return hashlib.sha256(b"large %d" % length + last).digest()


class LargeTiers(Tiers):
    """Tiers whose lower ones keep blocks in two sizes."""

    def start_over(self) -> None:
        self.length = self.config.blocks_per_large
        self.chunks: dict[int, Chunk] = {}  # by device block, if it is part of a large one
        self.next_names: dict[int, Name] = {}  # by named device block, the first successor seen
        self.branches: set[int] = set()  # device blocks with more than one successor
        super().start_over()

    def make_host(self) -> HostPool:
        return RunPool(self.config.host_blocks, self.length, self._leave_host)

    # ── Down ──────────────────────────────────────────────────────────────────

    def name(self, token_ids: Seq[int], block_ids: Seq[int], salt: Hashable) -> None:
        first = len(block_ids)
        while first > 0 and block_ids[first - 1] not in self.names:
            first -= 1
        super().name(token_ids, block_ids, salt)
        if first == len(block_ids) or block_ids[-1] not in self.names:
            return
        for index in range(max(1, first), len(block_ids)):
            before, name = block_ids[index - 1], self.names[block_ids[index]]
            if self.next_names.setdefault(before, name) != name:
                self.branches.add(before)
                chunk = self.chunks.get(before)
                if chunk is not None and chunk[-1] != before:
                    self._dissolve(chunk)
        for start in range(first - first % self.length, len(block_ids), self.length):
            chunk = tuple(block_ids[start : start + self.length])
            if len(chunk) == self.length and not self.branches.intersection(chunk[:-1]):
                self.chunks |= dict.fromkeys(chunk, chunk)
                if self.config.write_through:
                    self._chunk_through(chunk)

    def let_go(self, block_id: int, pool: Any) -> None:
        chunk = self.chunks.get(block_id)
        if chunk is not None:
            self._send_down(chunk)
            self._dissolve(chunk)
        self.next_names.pop(block_id, None)
        self.branches.discard(block_id)
        super().let_go(block_id, pool)

    def _send_down(self, chunk: Chunk) -> int | None:
        """Copy a large block to the host and return its first host block. If part of it is in use
        there, or there is no room, return None: then its small blocks are demoted one by one."""
        names = [self.names[block_id] for block_id in chunk]
        if any(name in self.host for name in names):
            self.copy_down()  # a small block with one of these names may be free in a moment
        first = self.host.add_run(names)
        if first is not None:
            for host, device in enumerate(chunk, first):
                self._plan_copy(device, host)
            if not self.is_planning:
                self.copy_down()
        return first

    def _dissolve(self, chunk: Chunk) -> None:
        for block_id in chunk:
            del self.chunks[block_id]

    def _write_through(self, block_ids: Seq[int]) -> None:
        """Does nothing: whole large blocks are written through, the edge when it is evicted."""

    def _chunk_through(self, chunk: Chunk) -> None:
        first = self._send_down(chunk)
        if first is not None:
            self._leave_host(first, self.names[chunk[0]])

    def _put(self, store: KVStore, block_id: int, name: Name) -> None:
        """Write the small block, or the large one that it is part of, unless it is there."""
        assert self.disk is not None
        if store is self.host_store:
            names = self.host.run_of(block_id)
            first = block_id - block_id % self.length
            block_ids: Seq[int] = range(first, first + self.length)
        else:
            block_ids = self.chunks.get(block_id, ())
            names = [self.names[one] for one in block_ids]
        if not names:
            if store is self.host_store or name not in self.host:
                super()._put(store, block_id, name)
            return
        large = large_name(names[-1], self.length)
        if large not in self.disk:
            data = b"".join(read_block(store, one) for one in block_ids)
            self.disk.put(large, self.identity, data)

    # ── Back ──────────────────────────────────────────────────────────────────

    def _entry_of(self, names: Seq[Name], index: int) -> Name | None:
        """The name of the disk's entry that has block `index` of a prefix."""
        assert self.disk is not None
        end = index - index % self.length + self.length
        if end <= len(names):
            large = large_name(names[end - 1], self.length)
            if large in self.disk:
                return large
        return names[index] if names[index] in self.disk else None

    def _tiers_from(self, state: Returning, first: int) -> list[str]:
        tiers = []
        for index in range(first, len(state.names)):
            name = state.names[index]
            if name in self.host:
                tiers.append("host")
            elif name in state.fetched:
                break
            elif self.disk is not None and self._entry_of(state.names, index) is not None:
                tiers.append("disk")
            elif name in state.in_store:
                tiers.append("store")
            else:
                break
        return tiers

    def _entries(self, state: Returning, indices: Seq[int]) -> list[Name]:
        names, wanted = state.names, []
        for index in indices:
            found = self._entry_of(names, index)
            if found is None or found in state.fetched:
                continue
            if found != names[index]:
                first = index - index % self.length
                state.parts[found] = names[first : first + self.length]
                state.fetched |= dict.fromkeys(state.parts[found], "disk")
            wanted.append(found)
            state.fetched[found] = "disk"
        return wanted

    def _unpacker(self) -> Unpack:
        identity, length, num_bytes = self.identity, self.length, self.block_bytes

        def unpack(data: bytes, name: Name) -> memoryview:
            whole = num_bytes * (length if len(data) > entry.HEAD.size + num_bytes else 1)
            return entry.unpack(data, identity, name, whole)

        return unpack

    def _arrive(self, state: Returning, name: Name, data: memoryview) -> bool:
        names = state.parts.get(name)
        if names is None:
            return super()._arrive(state, name, data)
        parts = [data[i * self.block_bytes :][: self.block_bytes] for i in range(len(names))]
        first = self.host.add_run(names)
        if first is None:  # some of it is there, or there is no room for all
            pairs = reversed(list(zip(names, parts, strict=True)))
            return all(super(LargeTiers, self)._arrive(state, *pair) for pair in pairs)
        for block_id, part in enumerate(parts, first):
            write_block(self.host_store, block_id, part)
        return True

    # ── To look at ────────────────────────────────────────────────────────────

    def everywhere(self, token_ids: Seq[int], salt: Hashable = None) -> list[list[str]]:
        found = super().everywhere(token_ids, salt)
        root = root_name(self.identity, salt)
        names = block_names(root, token_ids, self.config.block_size) if root else []
        for index, tiers in enumerate(found if self.disk is not None else ()):
            if "disk" not in tiers and self._entry_of(names, index) is not None:
                tiers.insert(len(tiers) - ("store" in tiers), "disk")
        return found

    def check(self) -> None:
        super().check()
        for block_id, chunk in self.chunks.items():
            if len(chunk) != self.length or block_id not in chunk or block_id not in self.names:
                raise AssertionError("tiers: a large block is not whole")
            if self.branches.intersection(chunk[:-1]):
                raise AssertionError("tiers: prefixes branch within a large block")
        if not self.next_names.keys() | self.branches <= self.names.keys():
            raise AssertionError("tiers: a block without a name has a successor")

    host: RunPool
