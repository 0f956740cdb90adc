"""Pairing heaps with common nodes: push, first and remove without allocation."""

cimport cython
from libc.stdlib cimport free, malloc

cdef enum:
    NOT_MEMBER = -2


@cython.final
cdef class HeapForest:
    def __cinit__(self, int capacity):
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.nodes = <HeapNode*>malloc(capacity * sizeof(HeapNode))
        if self.nodes == NULL:
            raise MemoryError("heap")
        self.capacity = capacity
        cdef int i
        for i in range(capacity):
            self.nodes[i].previous = NOT_MEMBER

    def __dealloc__(self):
        free(self.nodes)

    cpdef int push(self, int root, int item, int64_t major, int64_t minor) except -2 nogil:
        if not 0 <= item < self.capacity or self.nodes[item].previous != NOT_MEMBER:
            with gil:
                raise ValueError(f"item {item} is in a heap or not below the capacity of {self.capacity}")
        cdef HeapNode* node = &self.nodes[item]
        node.major, node.minor = major, minor
        node.first_child = node.next_sibling = node.previous = -1
        self.size += 1
        return self.meld(root, item)

    cpdef int remove(self, int root, int item) noexcept nogil:
        if not self.is_member(item):
            return root
        cdef HeapNode* node = &self.nodes[item]
        cdef int children = self.meld_children(item)
        self.size -= 1
        if item == root:
            node.previous = NOT_MEMBER
            return children
        if self.nodes[node.previous].first_child == item:
            self.nodes[node.previous].first_child = node.next_sibling
        else:
            self.nodes[node.previous].next_sibling = node.next_sibling
        if node.next_sibling >= 0:
            self.nodes[node.next_sibling].previous = node.previous
        node.previous = NOT_MEMBER
        return self.meld(root, children)

    cpdef bint is_member(self, int item) noexcept nogil:
        return 0 <= item < self.capacity and self.nodes[item].previous != NOT_MEMBER

    cdef int meld(self, int a, int b) noexcept nogil:
        """One heap of two: the later of the two roots becomes the first child of the other."""
        if a < 0 or b < 0:
            return max(a, b)
        cdef HeapNode* first = &self.nodes[a]
        cdef HeapNode* second = &self.nodes[b]
        if second.major < first.major or (second.major == first.major and second.minor < first.minor):
            a, b = b, a
            first, second = second, first
        second.previous = a
        second.next_sibling = first.first_child
        if first.first_child >= 0:
            self.nodes[first.first_child].previous = b
        first.first_child = b
        return a

    cdef int meld_children(self, int item) noexcept nogil:
        """One heap of the children of a node: neighbours first, in pairs, then all of these from the last one on."""
        cdef int a, b, paired = -1, root = -1, following = self.nodes[item].first_child
        while following >= 0:
            a = following
            b = self.nodes[a].next_sibling
            following = self.nodes[b].next_sibling if b >= 0 else -1
            self.nodes[a].next_sibling = self.nodes[a].previous = -1
            if b >= 0:
                self.nodes[b].next_sibling = self.nodes[b].previous = -1
            a = self.meld(a, b)
            self.nodes[a].next_sibling = paired
            paired = a
        while paired >= 0:
            following = self.nodes[paired].next_sibling
            self.nodes[paired].next_sibling = -1
            root = self.meld(root, paired)
            paired = following
        return root
