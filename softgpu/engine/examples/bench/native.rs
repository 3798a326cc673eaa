//! The loops of the kernels in native vector code. Each one computes the bits of its kernel from the same memory.

#![allow(clippy::many_single_char_names, reason = "the names of the kernels")]

/// The memory of a case: eight parts of as many words.
pub(crate) type MemoryParts<'m> = [&'m mut [u32]; 8];

/// True if this processor has the vector instructions of the loops.
pub(crate) fn is_supported() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    return true;
}

/// Defines loops that are compiled for vector registers of the width that machine code of kernels uses.
macro_rules! native {
    ($($(#[$doc:meta])* fn $name:ident($parts:ident $(, $n:ident: $ty:ty)*) $body:block)*) => {$(
        $(#[$doc])*
        pub(crate) fn $name($parts: MemoryParts<'_> $(, $n: $ty)*) {
            #[cfg_attr(target_arch = "x86_64", target_feature(enable = "avx2,fma"))]
            fn vector($parts: MemoryParts<'_> $(, $n: $ty)*) $body
            // SAFETY: the caller has seen that the processor has the instructions.
            #[cfg_attr(not(target_arch = "x86_64"), expect(unused_unsafe, reason = "needed for the instructions of x86-64"))]
            unsafe { vector($parts $(, $n)*) }
        }
    )*};
}

native! {
    fn vadd(parts) {
        let [a, b, c, ..] = parts;
        for ((c, a), b) in c.iter_mut().zip(&*a).zip(&*b) {
            *c = (f32::from_bits(*a) + f32::from_bits(*b)).to_bits();
        }
    }

    fn mandel(parts, side: u32, iterations: u32) {
        const LANES: usize = 16;
        let extent = side as f32;
        for (row, line) in (0u32..).zip(parts[0].chunks_exact_mut(side as usize).take(side as usize)) {
            let cy = row as f32 * 3.0 / extent - 1.5;
            for (group, out) in (0u32..).zip(line.chunks_exact_mut(LANES)) {
                let cx: [f32; LANES] =
                    core::array::from_fn(|n| (group * LANES as u32 + n as u32) as f32 * 3.0 / extent - 2.0);
                let ([mut x, mut y, mut xx, mut yy], mut live, mut count) =
                    ([[0f32; LANES]; 4], [!0u32; LANES], [0u32; LANES]);
                for _ in 0..iterations {
                    for n in 0..LANES {
                        let next = cx[n] + (xx[n] - yy[n]);
                        y[n] = (x[n] + x[n]).mul_add(y[n], cy);
                        x[n] = next;
                        (xx[n], yy[n]) = (next * next, y[n] * y[n]);
                        count[n] = count[n].wrapping_sub(live[n]);
                        live[n] &= if xx[n] + yy[n] < 4.0 { !0 } else { 0 };
                    }
                    if live.iter().fold(0, |any, live| any | live) == 0 {
                        break;
                    }
                }
                out.copy_from_slice(&count);
            }
        }
    }

    fn mc_pi(parts, threads: u64, iterations: u32, seed: u64) {
        const LANES: usize = 8;
        let mut total = 0u64;
        for first in (0..threads).step_by(LANES) {
            let mut state: [u64; LANES] = core::array::from_fn(|n| seed + first + n as u64);
            let mut hits = [0u32; LANES];
            for _ in 0..iterations {
                let (mut x, mut y) = ([0f32; LANES], [0f32; LANES]);
                for to in [&mut x, &mut y] {
                    for n in 0..LANES {
                        let old = state[n];
                        state[n] = old.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let word = ((old >> 18 ^ old) >> 27) as u32;
                        to[n] = word.rotate_right((old >> 59) as u32) as f32 * f32::from_bits(0x2f80_0000);
                    }
                }
                for n in 0..LANES {
                    hits[n] += u32::from(x[n].mul_add(x[n], y[n] * y[n]) < 1.0);
                }
            }
            total += hits.iter().map(|&hits| u64::from(hits)).sum::<u64>();
        }
        let sum = (u64::from(parts[0][0]) | u64::from(parts[0][1]) << 32).wrapping_add(total);
        (parts[0][0], parts[0][1]) = (sum as u32, (sum >> 32) as u32);
    }

    fn black_scholes(parts, rate: f32, volatility: f32) {
        let [call, put, _, stock, strike, years, ..] = parts;
        let inputs = stock.iter().zip(&*strike).zip(&*years);
        for ((call, put), ((stock, strike), years)) in call.iter_mut().zip(put.iter_mut()).zip(inputs) {
            let [s, x, t] = [*stock, *strike, *years].map(f32::from_bits);
            let spread = t.sqrt() * volatility;
            let drift = (volatility * 0.5).mul_add(volatility, rate) * t;
            let d1 = log2(s / x).mul_add(f32::from_bits(0x3f31_7218), drift) / spread;
            let (k1, k2) = (normal(d1) * 0.5, normal(d1 - spread) * 0.5);
            let discounted = exp2(t * rate * f32::from_bits(0xbfb8_aa3b)) * x;
            *call = (k1 * s - k2 * discounted).to_bits();
            *put = ((1.0 - k2) * discounted - (1.0 - k1) * s).to_bits();
        }
    }

    fn histogram(parts, count: usize, blocks: usize, threads: usize) {
        let [input, .., table, _] = parts;
        for block in 0..blocks {
            let mut own = [0u32; 256];
            for first in (block * threads..count).step_by(blocks * threads) {
                for word in &input[first / 4..(first + threads).min(count) / 4] {
                    for byte in word.to_le_bytes() {
                        own[usize::from(byte)] += 1;
                    }
                }
            }
            for (sum, own) in table.iter_mut().zip(own) {
                *sum = sum.wrapping_add(own);
            }
        }
    }

    fn product_of_tiles(parts, side: usize) {
        const TILE: usize = 16;
        let [a, b, c, ..] = parts;
        let tile = |from: &[u32], row: usize, column: usize| -> [[f32; TILE]; TILE] {
            core::array::from_fn(|y| {
                let line = &from[(row + y) * side + column..][..TILE];
                core::array::from_fn(|x| f32::from_bits(line[x]))
            })
        };
        for row in (0..side).step_by(TILE) {
            for column in (0..side).step_by(TILE) {
                let mut sums = [[0f32; TILE]; TILE];
                for k in (0..side).step_by(TILE) {
                    let (left, right) = (tile(a, row, k), tile(b, k, column));
                    for (sums, left) in sums.iter_mut().zip(&left) {
                        let mut line = *sums;
                        for (x, right) in left.iter().zip(&right) {
                            for (sum, y) in line.iter_mut().zip(right) {
                                *sum = x.mul_add(*y, *sum);
                            }
                        }
                        *sums = line;
                    }
                }
                for (y, sums) in sums.iter().enumerate() {
                    let line = &mut c[(row + y) * side + column..][..TILE];
                    line.copy_from_slice(&sums.map(f32::to_bits));
                }
            }
        }
    }

    /// The product of 16x16 and 16x8 matrices of f16, whose elements lie as in the registers of a warp.
    fn product_of_halves(parts, blocks: usize) {
        let [a, b, c, ..] = parts;
        for _ in 0..blocks {
            let (mut left, mut right, mut sums) = ([[0f32; 16]; 16], [[0f32; 8]; 16], [[0f32; 8]; 16]);
            for lane in 0..32 {
                let (group, thread) = (lane / 4, lane % 4 * 2);
                for n in 0..4 {
                    let (row, column) = (group + n % 2 * 8, thread + n / 2 * 8);
                    let word = a[lane * 4 + n];
                    (left[row][column], left[row][column + 1]) = (half(word & 0xffff), half(word >> 16));
                }
                for n in 0..2 {
                    let word = b[lane * 2 + n];
                    (right[thread + n * 8][group], right[thread + n * 8 + 1][group]) =
                        (half(word & 0xffff), half(word >> 16));
                }
            }
            for (sums, left) in sums.iter_mut().zip(&left) {
                for (x, right) in left.iter().zip(&right) {
                    for (sum, y) in sums.iter_mut().zip(right) {
                        *sum += x * y;
                    }
                }
            }
            for lane in 0..32 {
                for n in 0..4 {
                    c[lane * 4 + n] = sums[lane / 4 + n / 2 * 8][lane % 4 * 2 + n % 2].to_bits();
                }
            }
            core::hint::black_box((&mut *a, &mut *b, &mut *c));
        }
    }
}

/// The value of a finite f16.
#[inline(always)]
fn half(bits: u32) -> f32 {
    let magnitude = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits(0x7780_0000);
    f32::from_bits(magnitude.to_bits() | (bits & 0x8000) << 16)
}

/// 2^x, computed in f64 and rounded once.
#[inline(always)]
fn exp2(x: f32) -> f32 {
    let x = f64::from(x).clamp(-200.0, 200.0);
    let whole = x.round_ties_even();
    let fraction = x - whole;
    let mut term = [1f64; 12];
    for n in 1..12 {
        term[n] = term[n - 1] * core::f64::consts::LN_2 / n as f64;
    }
    let sum = term.iter().rev().skip(1).fold(term[11], |sum, term| sum * fraction + term);
    (sum * f64::from_bits((whole + (6_755_399_441_055_744.0 + 1023.0)).to_bits() << 52)) as f32
}

/// The logarithm of a normal number, computed in f64 and rounded once.
#[inline(always)]
fn log2(x: f32) -> f32 {
    let bits = f64::from(x).to_bits();
    let exponent = ((bits >> 32) as i32).wrapping_sub(0x3fe6_a09e) >> 20;
    let m = f64::from_bits(bits.wrapping_sub(u64::from(exponent.cast_unsigned()) << 52));
    let z = (m - 1.0) / (m + 1.0);
    let square = z * z;
    let term = |n: i32| 2.0 / core::f64::consts::LN_2 / f64::from(2 * n + 1);
    let sum = (0..8).rev().fold(term(8), |sum, n| sum * square + term(n));
    (f64::from(exponent) + z * sum) as f32
}

/// Twice the normal distribution, as the compiler of the kernels writes it.
#[inline(always)]
fn normal(value: f32) -> f32 {
    let bits = f32::from_bits;
    let value = if value.abs() > 14.5 { 14.5f32.copysign(value) } else { value };
    let scaled = value * bits(0xbf35_04f3);
    let rest = value.mul_add(bits(0xb24f_e77a), value.mul_add(bits(0xbf35_04f3), -scaled));
    let sum = scaled + rest;
    let x = sum.abs();
    let inverse = 1.0 / (x + 4.0);
    let quotient = (x - 4.0) * inverse;
    let error = (-quotient).mul_add(x, (-4f32).mul_add(quotient + 1.0, x));
    let u = inverse.mul_add(error, quotient);
    let polynomial = [
        0x3be6_e05b,
        0xbc81_fb4b,
        0x3d15_373b,
        0xbd88_7c5a,
        0x3dc0_21d5,
        0xbdce_d424,
        0x3d8b_74de,
        0x3c7b_f170,
        0xbe0e_f8d4,
        0x3f9d_d2c9,
    ];
    let p = polynomial.iter().fold(bits(0x3a69_a091), |p, c| p.mul_add(u, bits(*c)));
    let inverse = 1.0 / 2f32.mul_add(x, 1.0);
    let first = p * inverse;
    let ratio = (x.mul_add(first * -2.0, p) - first).mul_add(inverse, first);
    let square = x * x;
    let whole = (-square * bits(0x3fb8_aa3b)).trunc();
    let whole = if whole.abs() > 126.0 { 126f32.copysign(whole) } else { whole };
    let fraction = whole.mul_add(bits(0x3102_e308), whole.mul_add(bits(0xbf31_7218), -square));
    let power = exp2(fraction * bits(0x3fb8_aa3b)) * bits((whole + bits(0x4b40_007f)).to_bits() << 23);
    let power = power.mul_add((-x).mul_add(x, square), power);
    let tail = if x > bits(0x4120_e148) { 0.0 } else { ratio * power };
    let tail = if sum < 0.0 { 2.0 - tail } else { tail };
    let better = (sum * -2.0 * tail).mul_add(scaled - sum + rest, tail);
    if value >= -1.0 { tail } else { better }
}
