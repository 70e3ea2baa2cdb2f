# cython: language_level=3
"""CRC-32C of frames, with the processor's own instruction where it has one."""

from libc.stdint cimport uint8_t, uint32_t

cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>
    #include <string.h>

    /* One step of the polynomial 0x1EDC6F41, bits reversed, for each value of a byte. */
    static uint32_t postroad_crc_steps[256];

    static void postroad_crc_prepare(void) {
        for (uint32_t value = 0; value < 256; value++) {
            uint32_t rest = value;
            for (int bit = 0; bit < 8; bit++) rest = (rest >> 1) ^ ((rest & 1) ? 0x82F63B78u : 0);
            postroad_crc_steps[value] = rest;
        }
    }

    static uint32_t postroad_crc_bytes(uint32_t state, const uint8_t *data, size_t size) {
        if (postroad_crc_steps[1] == 0) postroad_crc_prepare();
        for (; size; size--) state = (state >> 8) ^ postroad_crc_steps[(state ^ *data++) & 0xFF];
        return state;
    }

    #if defined(__x86_64__) && defined(__GNUC__)
    __attribute__((target("sse4.2")))
    static uint32_t postroad_crc_words(uint32_t state, const uint8_t *data, size_t size) {
        uint64_t wide = state, word;
        for (; size >= 8; size -= 8, data += 8) {
            memcpy(&word, data, 8);
            wide = __builtin_ia32_crc32di(wide, word);
        }
        state = (uint32_t) wide;
        for (; size; size--) state = __builtin_ia32_crc32qi(state, *data++);
        return state;
    }

    static uint32_t postroad_crc(uint32_t state, const uint8_t *data, size_t size) {
        if (__builtin_cpu_supports("sse4.2")) return postroad_crc_words(state, data, size);
        return postroad_crc_bytes(state, data, size);
    }
    #else
    static uint32_t postroad_crc(uint32_t state, const uint8_t *data, size_t size) {
        return postroad_crc_bytes(state, data, size);
    }
    #endif

    /* Of a whole frame, as if the four bytes of its checksum were 0. */
    static uint32_t postroad_frame_checksum(const uint8_t *frame, size_t size) {
        static const uint8_t nothing[4] = {0, 0, 0, 0};
        uint32_t state = postroad_crc(0xFFFFFFFFu, frame, 12);
        state = postroad_crc(state, nothing, 4);
        return ~postroad_crc(state, frame + 16, size - 16);
    }
    """
    uint32_t frame_checksum "postroad_frame_checksum"(const uint8_t* frame, size_t size) noexcept nogil
