"""Binary heap with a position per item: push, pop and remove in O(log n), no allocation."""

cimport cython
from libc.stdlib cimport free, malloc


cdef inline bint is_before(HeapNode a, HeapNode b) noexcept nogil:
    return a.major < b.major or (a.major == b.major and a.minor < b.minor)


@cython.final
cdef class IndexedHeap:
    def __cinit__(self, int capacity):
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.nodes = <HeapNode*>malloc(capacity * sizeof(HeapNode))
        self.positions = <int*>malloc(capacity * sizeof(int))
        if self.nodes == NULL or self.positions == NULL:
            raise MemoryError("heap")
        self.capacity = capacity
        cdef int i
        for i in range(capacity):
            self.positions[i] = -1

    def __dealloc__(self):
        free(self.nodes)
        free(self.positions)

    cpdef int push(self, int item, int64_t major, int64_t minor) except -1 nogil:
        if not 0 <= item < self.capacity or self.positions[item] != -1:
            with gil:
                raise ValueError(f"item {item} is a member or not below the capacity of {self.capacity}")
        cdef HeapNode node
        node.major, node.minor, node.item = major, minor, item
        self.size += 1
        self.sift_up(self.size - 1, node)
        return 0

    cpdef int pop(self) noexcept nogil:
        if self.size == 0:
            return -1
        cdef int item = self.nodes[0].item
        self.remove(item)
        return item

    cpdef bint remove(self, int item) noexcept nogil:
        if not 0 <= item < self.capacity or self.positions[item] == -1:
            return False
        cdef int position = self.positions[item]
        self.positions[item] = -1
        self.size -= 1
        cdef HeapNode last = self.nodes[self.size]
        if last.item != item:
            self.sift_down(position, last)
            self.sift_up(self.positions[last.item], last)
        return True

    cpdef int64_t top_major(self) noexcept nogil:
        return self.nodes[0].major if self.size else 0

    cdef void sift_up(self, int position, HeapNode node) noexcept nogil:
        cdef int parent
        while position > 0:
            parent = (position - 1) // 2
            if not is_before(node, self.nodes[parent]):
                break
            self.nodes[position] = self.nodes[parent]
            self.positions[self.nodes[position].item] = position
            position = parent
        self.nodes[position] = node
        self.positions[node.item] = position

    cdef void sift_down(self, int position, HeapNode node) noexcept nogil:
        cdef int child = 2 * position + 1
        while child < self.size:
            if child + 1 < self.size and is_before(self.nodes[child + 1], self.nodes[child]):
                child += 1
            if not is_before(self.nodes[child], node):
                break
            self.nodes[position] = self.nodes[child]
            self.positions[self.nodes[position].item] = position
            position = child
            child = 2 * position + 1
        self.nodes[position] = node
        self.positions[node.item] = position
