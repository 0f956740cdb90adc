"""SipHash-2-4 with 128 bits of output."""

from libc.stdint cimport uint64_t


cdef struct Hash128:
    uint64_t low
    uint64_t high


cdef Hash128 read_key(bytes key)  # of 16 bytes
cdef Hash128 sip_hash(Hash128 key, const char* message, size_t length) noexcept nogil
cpdef bytes sip_hash_128(bytes key, bytes message)
