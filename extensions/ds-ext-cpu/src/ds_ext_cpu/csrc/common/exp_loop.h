// exp over fp32 numbers in cache; included by a loops file. See [Note: three passes].

// exp(x) = 2^n exp(r) with n = round(x / ln 2), |r| <= ln(2) / 2; x is kept within [-87.3, 88.3]. exp(r) is the
// polynomial of expf in the Cephes library (S. Moshier), off by at most 2 units in the last place. NaN stays NaN.
DS_CPU_INLINE float exp_of(float x) {
    x = x < -87.3f ? -87.3f : x;
    x = x > 88.3f ? 88.3f : x;
    const float shifted = x * 1.44269504f + 0x1.8p23f;  // no bit is left for a fraction
    const float whole = shifted - 0x1.8p23f;
    const float r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * r + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    const uint32_t power = (bits_of(shifted) - 0x4B400000u + 127u) << 23;
    return (sum * (r * r) + r + 1.0f) * float_of(power);
}
