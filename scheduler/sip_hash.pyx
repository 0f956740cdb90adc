"""SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012)."""

from libc.string cimport memcpy


cdef inline uint64_t rotate(uint64_t word, int num_bits) noexcept nogil:
    return (word << num_bits) | (word >> (64 - num_bits))


cdef inline void rounds(uint64_t* v, int num_rounds) noexcept nogil:
    cdef int i
    for i in range(num_rounds):
        v[0] += v[1]
        v[2] += v[3]
        v[1] = rotate(v[1], 13) ^ v[0]
        v[3] = rotate(v[3], 16) ^ v[2]
        v[0] = rotate(v[0], 32)
        v[2] += v[1]
        v[0] += v[3]
        v[1] = rotate(v[1], 17) ^ v[2]
        v[3] = rotate(v[3], 21) ^ v[0]
        v[2] = rotate(v[2], 32)


cdef inline void absorb(uint64_t* v, uint64_t word) noexcept nogil:
    v[3] ^= word
    rounds(v, 2)
    v[0] ^= word


cdef Hash128 read_key(bytes key):
    cdef Hash128 words
    if len(key) != 16:
        raise ValueError(f"key must have 16 bytes, has {len(key)}")
    memcpy(&words, <const char*>key, 16)
    return words


cdef Hash128 sip_hash(Hash128 key, const char* message, size_t length) noexcept nogil:
    cdef uint64_t[4] v
    cdef uint64_t word
    cdef size_t i
    cdef Hash128 result
    v[0] = key.low ^ <uint64_t>0x736F6D6570736575
    v[1] = key.high ^ <uint64_t>0x646F72616E646F6D ^ <uint64_t>0xEE
    v[2] = key.low ^ <uint64_t>0x6C7967656E657261
    v[3] = key.high ^ <uint64_t>0x7465646279746573
    for i in range(length // 8):
        memcpy(&word, message + 8 * i, 8)
        absorb(v, word)
    word = 0
    memcpy(&word, message + length // 8 * 8, length % 8)
    absorb(v, word | <uint64_t>length << 56)
    v[2] ^= 0xEE
    rounds(v, 4)
    result.low = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(v, 4)
    result.high = v[0] ^ v[1] ^ v[2] ^ v[3]
    return result


cpdef bytes sip_hash_128(bytes key, bytes message):
    cdef Hash128 result = sip_hash(read_key(key), message, len(message))
    return (<char*>&result)[:16]
