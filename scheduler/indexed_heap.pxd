"""A priority queue whose members can leave from the middle."""

from libc.stdint cimport int64_t


cdef struct HeapNode:
    int64_t major  # smaller comes first
    int64_t minor  # breaks ties; unique, so that the order is total
    int item


cdef class IndexedHeap:
    cdef readonly int capacity
    cdef readonly int size
    cdef HeapNode* nodes  # [capacity]; the children of node i are 2i + 1 and 2i + 2
    cdef int* positions  # [capacity]; where an item's node is, -1 when it is not a member

    cpdef int push(self, int item, int64_t major, int64_t minor) except -1 nogil
    cpdef int pop(self) noexcept nogil  # the first item, -1 when empty
    cpdef bint remove(self, int item) noexcept nogil  # false when it is not a member
    cpdef int64_t top_major(self) noexcept nogil  # of the first item, 0 when empty
    cdef void sift_up(self, int position, HeapNode node) noexcept nogil
    cdef void sift_down(self, int position, HeapNode node) noexcept nogil
