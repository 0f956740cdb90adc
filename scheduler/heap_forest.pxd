"""Priority queues over common items, whose members can leave from the middle."""

from libc.stdint cimport int64_t


cdef enum:
    EMPTY = -1  # root of a heap without members


cdef struct HeapNode:
    int64_t major  # smaller comes first
    int64_t minor  # breaks ties; unique in a heap, so that the order is total
    int first_child  # -1 for none
    int next_sibling  # -1 for none
    int previous  # the sibling before it, the parent of a first child, -1 for a root, -2 for no member


cdef class HeapForest:
    cdef readonly int capacity
    cdef readonly int size
    cdef HeapNode* nodes  # [capacity]

    cpdef int push(self, int root, int item, int64_t major, int64_t minor) except -2 nogil  # the new root
    cpdef int remove(self, int root, int item) noexcept nogil  # from the heap at this root, if it is a member; the new root
    cpdef bint is_member(self, int item) noexcept nogil
    cdef int meld(self, int a, int b) noexcept nogil
    cdef int meld_children(self, int item) noexcept nogil
