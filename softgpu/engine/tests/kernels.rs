//! Whole kernels of the project, compiled by nvcc, compared with plain Rust. In one file: they share one launch.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "test data"
)]

use crate::common::{Buffer, Params, Rig, shape};
use softgpu_engine::Pool;

const ELEMENTWISE: &str = include_str!("data/elementwise.ptx");
const COLLECTIVE: &str = include_str!("data/collective.ptx");

#[test]
fn vector_addition_matches_rust() {
    let mut rig = Rig::new(ELEMENTWISE);
    let n = 1000usize;
    let a: Vec<f32> = (0..n).map(|i| i as f32 * 0.5).collect();
    let b: Vec<f32> = (0..n).map(|i| 3.0 - i as f32).collect();
    let (x, y, z) = (Buffer::of(&a), Buffer::of(&b), Buffer::zeroed(n * 4));
    rig.map(&[&x, &y, &z]);
    rig.run("vadd", shape(8, 128), Params::new().buf(&x).buf(&y).buf(&z).put(n as i32));
    let expected: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    assert_eq!(z.all::<f32>(), expected);
}

#[test]
fn reductions_by_shared_memory_and_shuffles_match_the_sum() {
    let mut rig = Rig::new(COLLECTIVE);
    let n = 5000usize;
    let x: Vec<f32> = (0..n).map(|i| (i % 17) as f32).collect();
    let (a, o, p) = (Buffer::of(&x), Buffer::zeroed(16), Buffer::zeroed(4));
    rig.map(&[&a, &o, &p]);
    rig.run("reduce_shared", shape(4, 256), Params::new().buf(&a).buf(&o).put(n as i32));
    rig.run("reduce_shfl", shape(4, 256), Params::new().buf(&a).buf(&p).put(n as i32));
    let total: f32 = x.iter().sum();
    assert_eq!(o.all::<f32>().iter().sum::<f32>(), total);
    assert_eq!(p.get::<f32>(0), total);
}

#[test]
fn block_scan_and_bitonic_sort_match_rust() {
    let mut rig = Rig::new(COLLECTIVE);
    let x: Vec<i32> = (0..256).map(|i| (i * 37) % 11 - 5).collect();
    let (a, o) = (Buffer::of(&x), Buffer::zeroed(1024));
    let keys: Vec<u32> = (0..512u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
    let k = Buffer::of(&keys);
    rig.map(&[&a, &o, &k]);
    let mut s = shape(1, 256);
    s.shared = 1024;
    rig.run("scan_block", s, Params::new().buf(&a).buf(&o).put(256i32));
    let mut sum = 0;
    let expected: Vec<i32> = x
        .iter()
        .map(|v| {
            sum += v;
            sum
        })
        .collect();
    assert_eq!(o.all::<i32>(), expected);
    rig.run("bitonic_shared", shape(1, 512), Params::new().buf(&k));
    let mut sorted = keys;
    sorted.sort_unstable();
    assert_eq!(k.all::<u32>(), sorted);
}

const MATRIX: &str = include_str!("data/matrix.ptx");
const ARITH: &str = include_str!("data/arith.ptx");
const SYNC: &str = include_str!("data/sync.ptx");
const RUNTIME: &str = include_str!("data/runtime.ptx");

fn f16(v: f32) -> u16 {
    // Exact for the small integers and halves that the tests use.
    if v == 0.0 {
        return 0;
    }
    let b = v.to_bits();
    let (e, m) = ((b >> 23 & 0xff) as i32 - 127 + 15, b & 0x7f_ffff);
    assert!((1..31).contains(&e) && m & 0x1fff == 0, "{v} is not exact in f16");
    ((b >> 16 & 0x8000) | (e as u32) << 10 | m >> 13) as u16
}

#[test]
fn tiled_and_naive_matrix_products_match_rust() {
    let mut rig = Rig::new(MATRIX);
    let n = 64usize;
    let a: Vec<f32> = (0..n * n).map(|i| ((i * 7) % 13) as f32 - 6.0).collect();
    let b: Vec<f32> = (0..n * n).map(|i| ((i * 5) % 11) as f32 - 5.0).collect();
    let (x, y, c, d) = (Buffer::of(&a), Buffer::of(&b), Buffer::zeroed(n * n * 4), Buffer::zeroed(n * n * 4));
    rig.map(&[&x, &y, &c, &d]);
    let mut s = shape(4, 16);
    (s.grid, s.block) = ([4, 4, 1], [16, 16, 1]);
    rig.run("gemm_tiled", s, Params::new().buf(&x).buf(&y).buf(&c).put(n as i32));
    let mut s = shape(4, 16);
    (s.grid, s.block) = ([5, 5, 1], [16, 14, 1]);
    rig.run("gemm_naive", s, Params::new().buf(&x).buf(&y).buf(&d).put(n as i32));
    let expected: Vec<f32> =
        (0..n * n).map(|i| (0..n).map(|k| a[i / n * n + k] * b[k * n + i % n]).sum()).collect();
    assert_eq!(c.all::<f32>(), expected);
    assert_eq!(d.all::<f32>(), expected);
}

#[test]
fn wmma_product_matches_rust() {
    let mut rig = Rig::new(MATRIX);
    let (m, n, k) = (32usize, 32usize, 48usize);
    let a: Vec<f32> = (0..m * k).map(|i| ((i * 7) % 13) as f32 - 6.0).collect();
    let b: Vec<f32> = (0..n * k).map(|i| ((i * 5) % 11) as f32 - 5.0).collect();
    let half = |v: &[f32]| Buffer::of(&v.iter().map(|&x| f16(x)).collect::<Vec<u16>>());
    let (x, y, c) = (half(&a), half(&b), Buffer::zeroed(m * n * 4));
    rig.map(&[&x, &y, &c]);
    let mut s = shape(1, 64);
    s.grid = [1, 2, 1];
    rig.run("wmma_gemm", s, Params::new().buf(&x).buf(&y).buf(&c).put(m as i32).put(n as i32).put(k as i32));
    // B is column-major: element (j, column) is at column * k + j.
    let expected: Vec<f32> =
        (0..m * n).map(|i| (0..k).map(|j| a[i / n * k + j] * b[i % n * k + j]).sum()).collect();
    assert_eq!(c.all::<f32>(), expected);
}

#[test]
fn mma_with_the_fragment_layout_of_the_isa_matches_rust() {
    let mut rig = Rig::new(MATRIX);
    let a = |r: usize, k: usize| ((r * 3 + k * 5) % 9) as f32 - 4.0;
    let b = |k: usize, c: usize| ((k * 7 + c) % 5) as f32 - 2.0;
    let pair = |x: f32, y: f32| u32::from(f16(x)) | u32::from(f16(y)) << 16;
    // The fragment tables of the ISA for m16n8k16.
    let (mut fa, mut fb) = (vec![0u32; 128], vec![0u32; 64]);
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        fa[lane * 4] = pair(a(g, 2 * t), a(g, 2 * t + 1));
        fa[lane * 4 + 1] = pair(a(g + 8, 2 * t), a(g + 8, 2 * t + 1));
        fa[lane * 4 + 2] = pair(a(g, 2 * t + 8), a(g, 2 * t + 9));
        fa[lane * 4 + 3] = pair(a(g + 8, 2 * t + 8), a(g + 8, 2 * t + 9));
        fb[lane * 2] = pair(b(2 * t, g), b(2 * t + 1, g));
        fb[lane * 2 + 1] = pair(b(2 * t + 8, g), b(2 * t + 9, g));
    }
    let (x, y, o) = (Buffer::of(&fa), Buffer::of(&fb), Buffer::zeroed(512));
    rig.map(&[&x, &y, &o]);
    rig.run("mma_asm", shape(1, 32), Params::new().buf(&x).buf(&y).buf(&o));
    for lane in 0..32usize {
        for i in 0..4 {
            let (row, column) = (lane / 4 + 8 * (i / 2), lane % 4 * 2 + i % 2);
            let expected: f32 = (0..16).map(|k| a(row, k) * b(k, column)).sum();
            assert_eq!(o.get::<f32>(lane * 4 + i), expected, "lane {lane} element {i}");
        }
    }
}

#[test]
fn ldmatrix_and_cp_async_move_the_expected_elements() {
    let mut rig = Rig::new(MATRIX);
    let g: Vec<u16> = (0..256).map(|i| i * 257).collect();
    let (x, o) = (Buffer::of(&g), Buffer::zeroed(128));
    let tiles: Vec<f32> = (0..8 * 128 * 4).map(|i| i as f32).collect();
    let (t, u) = (Buffer::of(&tiles), Buffer::zeroed(7 * 128 * 16));
    rig.map(&[&x, &o, &t, &u]);
    rig.run("ldmatrix_k", shape(1, 32), Params::new().buf(&x).buf(&o));
    for lane in 0..32usize {
        let mut expected = 0u32;
        for matrix in 0..4 {
            // Row r of matrix i is at the address given by lane 8 i + r.
            let from = matrix * 8 + lane / 4;
            let start = from % 16 * 16 + from / 16 * 8 + lane % 4 * 2;
            expected ^= u32::from(g[start]) | u32::from(g[start + 1]) << 16;
        }
        assert_eq!(o.get::<u32>(lane), expected, "lane {lane}");
    }
    rig.run("cpasync", shape(1, 128), Params::new().buf(&t).buf(&u));
    for i in 0..7 {
        for n in 0..128 {
            for e in 0..4 {
                assert_eq!(u.get::<f32>((i * 128 + n) * 4 + e), tiles[(i * 128 + 127 - n) * 4 + e]);
            }
        }
    }
}

#[test]
fn integer_intrinsics_match_rust() {
    let mut rig = Rig::new(ARITH);
    let a: Vec<i32> = (0..64i32).map(|i| i.wrapping_mul(0x1234_5677).wrapping_sub(1_000_003)).collect();
    let b: Vec<i32> = (0..64i32).map(|i| (i % 2 * 2 - 1) * (i * 77_777 + 3)).collect();
    let (x, y, o) = (Buffer::of(&a), Buffer::of(&b), Buffer::zeroed(256));
    rig.map(&[&x, &y, &o]);
    rig.run("i32math", shape(1, 64), Params::new().buf(&x).buf(&y).buf(&o));
    for (i, (&x, &y)) in a.iter().zip(&b).enumerate() {
        let (ux, uy) = (x as u32, y as u32);
        let dp4a: i32 = x
            .to_le_bytes()
            .iter()
            .zip(y.to_le_bytes())
            .map(|(&p, q)| i32::from(p as i8) * i32::from(q as i8))
            .sum();
        let sx24 = (x << 8) >> 8;
        let sy24 = (y << 8) >> 8;
        let add2 = (ux.wrapping_add(uy) & 0xffff) | ((ux >> 16).wrapping_add(uy >> 16) << 16);
        let abs4 =
            u32::from_le_bytes(core::array::from_fn(|k| ux.to_le_bytes()[k].abs_diff(uy.to_le_bytes()[k])));
        let terms = [
            x.wrapping_div(y) as u32,
            x.wrapping_rem(y) as u32,
            ((i64::from(x) * i64::from(y)) >> 32) as u32,
            ux.leading_zeros(),
            uy.count_ones(),
            ux.reverse_bits(),
            ux,
            (((u64::from(uy) << 32 | u64::from(ux)) << 7) >> 32) as u32,
            x.abs_diff(y).wrapping_add(3),
            x.wrapping_abs() as u32,
            x.min(y) as u32,
            x.max(y) as u32,
            (dp4a + 3) as u32,
            if uy < 32 { ux << uy } else { 0 },
            (if uy < 32 { x >> uy } else { x >> 31 }) as u32,
            if x == 0 { 0 } else { ux.trailing_zeros() + 1 },
            sx24.wrapping_mul(sy24) as u32,
            add2,
            abs4,
        ];
        let expected = terms.iter().fold(0u32, |s, &t| s.wrapping_add(t));
        assert_eq!(o.get::<u32>(i), expected, "{x} {y}");
    }
}

#[test]
fn integer_intrinsics_of_64_bits_match_rust() {
    let mut rig = Rig::new(ARITH);
    let a: Vec<i64> = (0..32i64).map(|i| i.wrapping_mul(0x1234_5678_9abc_def1).wrapping_sub(77)).collect();
    let b: Vec<i64> = (0..32i64).map(|i| (i % 2 * 2 - 1) * (i * 7_777_777_777 + 3)).collect();
    let u: Vec<u64> = (0..32u64).map(|i| i.wrapping_mul(0xfedc_ba98_7654_3211)).collect();
    let (x, y, o, p) = (Buffer::of(&a), Buffer::of(&b), Buffer::zeroed(256), Buffer::of(&u));
    rig.map(&[&x, &y, &o, &p]);
    rig.run("i64math", shape(1, 32), Params::new().buf(&x).buf(&y).buf(&o).buf(&p));
    for i in 0..32 {
        let (a, b, u) = (a[i], b[i], u[i]);
        let c = a.wrapping_div(b).wrapping_add(a.wrapping_rem(b).wrapping_mul(a >> 3));
        assert_eq!(o.get::<i64>(i), c, "{a} {b}");
        let hi = ((u128::from(u) * u128::from(a as u64)) >> 64) as u64;
        let v = hi
            .wrapping_add(u64::from(u.leading_zeros()))
            .wrapping_add(u64::from(u.count_ones()))
            .wrapping_add((a as u64).reverse_bits());
        let wide = u128::from(v).wrapping_mul(a as i128 as u128) >> 64;
        let expected = v.wrapping_add((v / 7).wrapping_add(wide as u64));
        assert_eq!(p.get::<u64>(i), expected, "{a} {u}");
    }
}

#[test]
fn monte_carlo_and_philox_match_rust() {
    let mut rig = Rig::new(ARITH);
    let (c, o) = (Buffer::zeroed(8), Buffer::zeroed(64 * 16));
    rig.map(&[&c, &o]);
    rig.run("mc_pi", shape(3, 96), Params::new().buf(&c).put(101i32).put(42u64));
    let mut hits = 0u64;
    for t in 0..3 * 96u64 {
        let mut s = 42 + t;
        let mut next = || {
            let o = s;
            s = o.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((((o >> 18) ^ o) >> 27) as u32).rotate_right((o >> 59) as u32) as f32 * 2.328_306_4e-10
        };
        for _ in 0..101 {
            let (x, y) = (next(), next());
            hits += u64::from(x.mul_add(x, y * y) < 1.0);
        }
    }
    assert_eq!(c.get::<u64>(0), hits);
    rig.run("philox", shape(2, 32), Params::new().buf(&o).put(11u32).put(22u32));
    let mut c = [5u32, 0, 0, 0];
    let mut k = [11u32, 22];
    for _ in 0..10 {
        let p0 = u64::from(c[0]) * 0xD251_1F53;
        let p1 = u64::from(c[2]) * 0xCD9E_8D57;
        c = [(p1 >> 32) as u32 ^ c[1] ^ k[0], p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k[1], p0 as u32];
        k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
    }
    assert_eq!([o.get(20), o.get(21), o.get(22), o.get::<u32>(23)], c);
}

#[test]
fn math_library_results_are_within_1e_9_of_rust() {
    let mut rig = Rig::new(ARITH);
    let x: Vec<f64> = (1..33).map(|i| f64::from(i) * 0.03).collect();
    let (a, o) = (Buffer::of(&x), Buffer::zeroed(256));
    rig.map(&[&a, &o]);
    rig.run("f64math", shape(1, 32), Params::new().buf(&a).buf(&o).put(32i32));
    for (i, &x) in x.iter().enumerate() {
        // Computes erf and tgamma by numerical integration.
        let steps = 20_000;
        let h = x / f64::from(steps);
        let f = |t: f64| (-t * t).exp();
        let erf = (0..steps)
            .map(|k| {
                let t = f64::from(k) * h;
                h / 6.0 * (f(t) + 4.0 * f(t + h / 2.0) + f(t + h))
            })
            .sum::<f64>()
            * 2.0
            / std::f64::consts::PI.sqrt();
        // Stirling's series at x + 10; the recurrence leads back to x.
        let z = x + 10.0;
        let ln = (z - 0.5) * z.ln() - z + 0.5 * (2.0 * std::f64::consts::PI).ln() + 1.0 / (12.0 * z)
            - 1.0 / (360.0 * z.powi(3))
            + 1.0 / (1260.0 * z.powi(5))
            - 1.0 / (1680.0 * z.powi(7));
        let gamma = ln.exp() / (0..10).map(|k| x + f64::from(k)).product::<f64>();
        let expected = x.sin()
            + x.cos()
            + x.exp()
            + x.ln()
            + x.powf(1.7)
            + x.atan2(2.0)
            + x.sqrt()
            + 1.0 / x.sqrt()
            + 1.0 / x
            + x / 3.0
            + x % 2.0
            + x.floor()
            + x.round_ties_even()
            + x.tanh()
            + erf
            + gamma
            + x.cbrt()
            + (x + 1.0)
            + x.mul_add(x, x);
        let got = o.get::<f64>(i);
        assert!((got - expected).abs() < 1e-9 * expected.abs().max(1.0), "{x}: {got} {expected}");
    }
}

#[test]
fn conversion_kernel_matches_rust() {
    let mut rig = Rig::new(ARITH);
    let a: Vec<f32> = (0..32).map(|i| (i as f32 - 16.0) * 3.75 + 0.5).collect();
    let d: Vec<f64> = (0..32).map(|i| (f64::from(i) - 16.0) * 1000.5).collect();
    let (pa, pd) = (Buffer::of(&a), Buffer::of(&d));
    let (o, l, u, s, c, e) = (
        Buffer::zeroed(128),
        Buffer::zeroed(256),
        Buffer::zeroed(128),
        Buffer::zeroed(64),
        Buffer::zeroed(32),
        Buffer::zeroed(256),
    );
    rig.map(&[&pa, &pd, &o, &l, &u, &s, &c, &e]);
    let p = Params::new().buf(&pa).buf(&pd).buf(&o).buf(&l).buf(&u).buf(&s).buf(&c).buf(&e);
    rig.run("cvts", shape(1, 32), p);
    for i in 0..32 {
        let (x, y) = (a[i], d[i]);
        let io = x.round_ties_even() as i32 + x.trunc() as i32 + y as i32;
        let il = x as i64 + y.round_ties_even() as i64;
        let iu = (x as u32).wrapping_add(x.to_bits());
        assert_eq!(o.get::<i32>(i), io);
        assert_eq!(l.get::<i64>(i), il);
        assert_eq!(u.get::<u32>(i), iu);
        assert_eq!(s.get::<i16>(i), io as i16);
        assert_eq!(c.get::<u8>(i), x as i32 as u8, "{x}");
        let bits = (u64::from(io as u32) << 32) | u64::from(iu);
        let expected = il as f64 + f64::from(iu) + f64::from(io as f32) + f64::from_bits(bits);
        assert!(e.get::<f64>(i) == expected || (expected.is_nan() && e.get::<f64>(i).is_nan()));
    }
}

#[test]
fn votes_matches_and_reductions_of_a_warp_match_rust() {
    let mut rig = Rig::new(SYNC);
    let a: Vec<i32> = (0..64).map(|i| (i * 5) % 7 - 3).collect();
    let (x, o) = (Buffer::of(&a), Buffer::zeroed(256));
    rig.map(&[&x, &o]);
    rig.run("vote_ops", shape(1, 64), Params::new().buf(&x).buf(&o));
    let all = a.iter().filter(|v| **v != 0).count() as u32;
    for i in 0..64 {
        let w = &a[i / 32 * 32..i / 32 * 32 + 32];
        let ballot = w.iter().enumerate().fold(0u32, |m, (n, v)| m | u32::from(*v > 0) << n);
        let (p, q) = (u32::from(w.iter().all(|v| *v != 0)), u32::from(w.iter().any(|v| *v != 0)));
        let same = w.iter().all(|v| v >> 2 == w[0] >> 2);
        let matched = if same { !0u32 } else { 0 };
        let sum = w.iter().sum::<i32>() as u32;
        let max = *w.iter().max().unwrap() as u32;
        let block = all + u32::from(all == 64) + u32::from(all != 0);
        let expected = [ballot, p, q, matched, u32::from(same), sum, max, block]
            .iter()
            .fold(0u32, |s, &t| s.wrapping_add(t));
        assert_eq!(o.get::<u32>(i), expected);
    }
}

#[test]
fn atomics_across_blocks_lose_no_update() {
    // Two workers decide by their order which of the old values that the kernel stores are the last ones.
    for workers in [1, 2] {
        let mut rig = Rig::new(SYNC);
        (rig.pool, rig.alone) = (Pool::new(workers), workers > 1);
        let a = Buffer::of(&[0i32; 16]);
        let u = Buffer::of(&[7u32, 1000, 0, 0, !0, 0, 0, 0, 0]);
        let l = Buffer::of(&[0u64, 99, 0]);
        let (f, d) = (Buffer::of(&[0.5f32, 0.0]), Buffer::of(&[0.25f64]));
        a.set(2, 1000i32);
        rig.map(&[&a, &u, &l, &f, &d]);
        rig.run("atomics", shape(20, 100), Params::new().buf(&a).buf(&u).buf(&l).buf(&f).buf(&d));
        let n = 2000;
        assert_eq!(a.get::<i32>(0), n);
        assert_eq!(a.get::<i32>(1), -n);
        assert_eq!(a.get::<i32>(2), 0);
        assert_eq!(u.get::<u32>(3), 99);
        assert_eq!(u.get::<u32>(4), (0..100u32).fold(!0, |m, t| m & !t));
        assert_eq!(u.get::<u32>(5), 127);
        assert_eq!(u.get::<u32>(6), (0..100u32).fold(0, |m, t| m ^ t).wrapping_mul(0));
        assert_eq!(u.get::<u32>(0), (7 + 2000) % 101);
        // 1000 is above the bound of 100, so the first decrement wraps to it.
        assert_eq!(u.get::<u32>(1), 100 - (1999 % 101));
        assert_eq!(l.get::<u64>(0), 7);
        assert_eq!(l.get::<u64>(2), 99);
        assert_eq!(f.get::<f32>(0), 2000.5);
        assert_eq!(d.get::<f64>(0), 2000.25);
        assert_eq!(a.get::<i32>(10), 5);
        assert_eq!(a.get::<i32>(12), 1);
        assert_eq!((a.get::<i32>(13), a.get::<i32>(14)), (n, n));
    }
}

#[test]
fn spin_locks_and_volatile_waits_make_progress() {
    let mut rig = Rig::new(SYNC);
    let (m, v, f, o) = (Buffer::zeroed(4), Buffer::zeroed(4), Buffer::zeroed(4), Buffer::zeroed(128));
    rig.map(&[&m, &v, &f, &o]);
    rig.run("spinlock", shape(4, 64), Params::new().buf(&m).buf(&v));
    assert_eq!(v.get::<u32>(0), 256);
    rig.run("volat", shape(1, 32), Params::new().buf(&f).buf(&o));
    assert_eq!(o.all::<u32>(), vec![1; 32]);
}

#[test]
fn warp_barriers_and_cooperative_groups_match_rust() {
    let mut rig = Rig::new(SYNC);
    let x: Vec<i32> = (0..64).map(|i| i * 3).collect();
    let b = Buffer::of(&x);
    let values: Vec<i32> = (0..777).map(|i| i % 10 - 3).collect();
    let (y, o, n, out) = (Buffer::of(&values), Buffer::zeroed(4), Buffer::zeroed(4), Buffer::zeroed(777 * 4));
    rig.map(&[&b, &y, &o, &n, &out]);
    rig.run("barwarp", shape(1, 64), Params::new().buf(&b));
    let got = b.all::<i32>();
    assert_eq!(&got[..32], &x[..32]);
    assert_eq!(&got[32..], &x[..32]);
    rig.run("cg_reduce", shape(3, 96), Params::new().buf(&y).buf(&o).put(777i32));
    assert_eq!(o.get::<i32>(0), values.iter().sum());
    // The order in which the warps count decides the place of each value.
    rig.alone = true;
    rig.run("cg_coalesced", shape(8, 100), Params::new().buf(&n).buf(&out).buf(&y).put(777i32));
    let mut positive: Vec<i32> = values.iter().copied().filter(|v| *v > 0).collect();
    assert_eq!(n.get::<u32>(0) as usize, positive.len());
    let mut got = out.all::<i32>()[..positive.len()].to_vec();
    got.sort_unstable();
    positive.sort_unstable();
    assert_eq!(got, positive);
}

#[test]
fn grid_barrier_synchronises_a_cooperative_launch_and_traps_in_others() {
    let mut rig = Rig::new(SYNC);
    let a: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let (x, y, w) = (Buffer::of(&a), Buffer::zeroed(4000), Buffer::zeroed(32));
    rig.map(&[&x, &y, &w]);
    let mut s = shape(12, 64);
    s.cooperative = Some(w.addr());
    rig.run("cg_gridsync", s, Params::new().buf(&x).buf(&y).put(1000i32));
    let expected: Vec<f32> = (0..1000).map(|i| a[(i + 1) % 1000] * 2.0).collect();
    assert_eq!(x.all::<f32>(), expected);
    // Without a workspace the kernel traps.
    let fault =
        rig.launch("cg_gridsync", shape(2, 64), Params::new().buf(&x).buf(&y).put(1000i32)).unwrap_err();
    assert_eq!(fault.kind, softgpu_engine::FaultKind::Trap);
}

#[test]
fn recursive_indirect_and_virtual_calls_match_rust() {
    let mut rig = Rig::new(RUNTIME);
    let o = Buffer::zeroed(128);
    let a: Vec<f32> = (0..32).map(|i| i as f32 + 1.0).collect();
    let b: Vec<f32> = (0..32).map(|i| 3.0 - i as f32).collect();
    let k: Vec<i32> = (0..32).map(|i| i % 3).collect();
    let (x, y, z, w) = (Buffer::of(&a), Buffer::of(&b), Buffer::zeroed(128), Buffer::of(&k));
    let v = Buffer::of(&a);
    rig.map(&[&o, &x, &y, &z, &w, &v]);
    rig.run("recurse", shape(1, 20), Params::new().buf(&o).put(1i32));
    let mut fib = vec![0, 1];
    for i in 2..32 {
        fib.push(fib[i - 1] + fib[i - 2]);
    }
    assert_eq!(&o.all::<i32>()[..20], &fib[1..21]);
    rig.run("indirect", shape(1, 32), Params::new().buf(&x).buf(&y).buf(&z).buf(&w));
    let expected: Vec<f32> = (0..32)
        .map(|i| match i % 3 {
            0 => a[i] + b[i],
            1 => a[i] * b[i],
            _ => a[i] / b[i],
        })
        .collect();
    assert_eq!(z.all::<f32>(), expected);
    rig.run("virt", shape(1, 32), Params::new().buf(&v).buf(&w));
    let expected: Vec<f32> = (0..32).map(|i| if i % 3 == 0 { a[i].sqrt() } else { a[i] * 2.0 }).collect();
    assert_eq!(v.all::<f32>(), expected);
}

#[test]
fn call_of_a_bad_target_fails_with_its_address() {
    let mut rig = Rig::new(RUNTIME);
    let x = Buffer::of(&[1.0f32; 32]);
    let k = Buffer::of(&[0i32; 32]);
    rig.map(&[&x, &k]);
    let table = rig.linked.module().globals().iter().position(|g| g.name == "ops").unwrap();
    rig.globals[table].set(0, 0x1234u64);
    let fault =
        rig.launch("indirect", shape(1, 32), Params::new().buf(&x).buf(&x).buf(&x).buf(&k)).unwrap_err();
    assert_eq!((fault.kind, fault.address), (softgpu_engine::FaultKind::InvalidPc, 0x1234));
}

#[test]
fn printf_assert_and_heap_of_the_device_work() {
    use softgpu_engine::FaultKind;
    let mut rig = Rig::new(RUNTIME);
    rig.run("kprintf", shape(2, 32), Params::new().put(2i32));
    let mut lines: Vec<String> = rig.text().lines().map(str::to_owned).collect();
    lines.sort();
    assert_eq!(
        lines,
        [
            "thread 0 block 0 f 0.000000 s str",
            "thread 0 block 1 f 0.000000 s str",
            "thread 1 block 0 f 1.500000 s str",
            "thread 1 block 1 f 1.500000 s str"
        ]
    );
    let x = Buffer::of(&[3i32, 1, 0, 5]);
    rig.map(&[&x]);
    let fault = rig.launch("kassert", shape(1, 4), Params::new().buf(&x)).unwrap_err();
    assert_eq!((fault.kind, fault.thread), (FaultKind::Assert, [2, 0, 0]));
    let reports = String::from_utf8(rig.host.reports.lock().unwrap().concat()).unwrap();
    assert!(
        reports.ends_with(
            "runtime.cu:16: void kassert(int *): block: [0,0,0], thread: [2,0,0] Assertion `x[threadIdx.x] > 0` failed.\n"
        ),
        "{reports}"
    );
    assert_eq!(reports.lines().count(), 1, "{reports}");
    let y = Buffer::of(&[3i32, 1, -2, 5]);
    let p = Buffer::zeroed(32);
    let heap: Vec<Buffer> = (0..3).map(|_| Buffer::zeroed(64)).collect();
    rig.map(&[&y, &p, &heap[0], &heap[1], &heap[2]]);
    let fault = rig.launch("ktrap", shape(1, 4), Params::new().buf(&y)).unwrap_err();
    assert_eq!((fault.kind, fault.thread), (FaultKind::Trap, [2, 0, 0]));
    rig.host.heap.lock().unwrap().extend(heap.iter().map(Buffer::addr));
    rig.run("dynmalloc", shape(1, 4), Params::new().buf(&p).put(10i32));
    let got = p.all::<u64>();
    assert_eq!(got, [heap[2].addr(), heap[1].addr(), heap[0].addr(), 0]);
    assert_eq!(heap[2].get::<i32>(0), 0);
    assert_eq!(heap[1].get::<i32>(0), 1);
    assert_eq!(*rig.host.freed.lock().unwrap(), [heap[1].addr()]);
    let m = rig.linked.module();
    let managed = m.globals().iter().find(|g| g.name == "mcount").unwrap();
    assert!(managed.managed && !managed.initialised);
}

#[test]
fn structures_switches_and_local_arrays_match_rust() {
    let mut rig = Rig::new(ELEMENTWISE);
    let p: Vec<f32> = (0..50).map(|i| i as f32).collect();
    let (pp, o) = (Buffer::of(&p), Buffer::zeroed(200));
    let x: Vec<i32> = (0..32).map(|i| i % 12).collect();
    let sw = Buffer::of(&x);
    let big: Vec<i32> = (0..2048).map(|i| (i * 31) % 97).collect();
    let la = Buffer::of(&big);
    rig.map(&[&pp, &o, &sw, &la]);
    // struct P { int n; float a; double d; short s[5]; const float* p; }
    let s = [1i16, -2, 3, -4, 5];
    let mut params = Params::new().put(50i32).put(2.5f32).put(0.25f64);
    for v in s {
        params = params.put(v);
    }
    params = params.put(pp.addr()).put(o.addr());
    rig.run("structparam", shape(1, 32), params);
    for i in 0..50 {
        assert_eq!(o.get::<f32>(i), 2.5f32.mul_add(p[i], 0.25) + f32::from(s[i % 5]));
    }
    rig.run("switchk", shape(1, 32), Params::new().buf(&sw));
    for (i, &v) in x.iter().enumerate() {
        let i_ = i as i32;
        let expected = match v {
            0 => 7,
            1 => v * 3,
            2 => v - 9,
            3 => v ^ 5,
            4 => i_,
            5 => v / 3,
            6 => -v,
            9 => !v,
            _ => -1,
        };
        assert_eq!(sw.get::<i32>(i), expected, "case {v}");
    }
    rig.run("localarr", shape(1, 32), Params::new().buf(&la).put(100i32));
    for t in 0..32usize {
        let mut a: Vec<i32> = (0..64).map(|i| big[i * 32 + t]).collect();
        for i in 0..100i32 {
            let at = (a[(i & 63) as usize] & 63) as usize;
            a[at] += i;
        }
        assert_eq!(la.get::<i32>(t), a.iter().sum::<i32>());
    }
}

#[test]
fn vector_accesses_and_byte_copies_match_rust() {
    let mut rig = Rig::new(ELEMENTWISE);
    let a: Vec<f32> = (0..128).map(|i| i as f32 * 0.25).collect();
    let c: Vec<u8> = (0..128).map(|i| i as u8 * 2).collect();
    let d: Vec<i16> = (0..64).map(|i| i as i16 * -3).collect();
    let e: Vec<i32> = (0..96 * 4).map(|i| i * 5).collect();
    let (pa, pb, pc, pd, pe) =
        (Buffer::of(&a), Buffer::zeroed(512), Buffer::of(&c), Buffer::of(&d), Buffer::of(&e));
    let src: Vec<u8> = (0..100).map(|i| i as u8 ^ 0x5a).collect();
    let (from, to) = (Buffer::of(&src), Buffer::of(&vec![1u8; 4 * 37 + 64]));
    rig.map(&[&pa, &pb, &pc, &pd, &pe, &from, &to]);
    rig.run("vec4", shape(1, 32), Params::new().buf(&pa).buf(&pb).buf(&pc).buf(&pd).buf(&pe));
    for i in 0..32 {
        assert_eq!(pb.get::<f64>(2 * i), f64::from(a[4 * i] + a[4 * i + 1]));
        assert_eq!(pb.get::<f64>(2 * i + 1), f64::from(a[4 * i + 2] * a[4 * i + 3]));
        assert_eq!(pc.get::<u8>(4 * i), c[4 * i].wrapping_add(3));
        assert_eq!(pc.get::<u8>(4 * i + 3), c[4 * i + 1]);
        assert_eq!((pd.get::<i16>(2 * i), pd.get::<i16>(2 * i + 1)), (d[2 * i + 1], d[2 * i]));
        assert_eq!(pe.get::<i32>(4 * i + 2), e[4 * i]);
        assert_eq!(pe.get::<i32>(4 * (i + 64) + 2), e[4 * i]);
    }
    rig.run("memcpyk", shape(1, 4), Params::new().buf(&to).buf(&from).put(37i32));
    for t in 0..4 {
        for (i, byte) in src.iter().enumerate().take(37) {
            assert_eq!(to.get::<u8>(t * 37 + i), *byte);
        }
    }
    assert!((0..64).all(|i| to.get::<u8>(148 + i) == 0));
}

#[test]
fn half_precision_matches_rust() {
    let mut rig = Rig::new(MATRIX);
    let a: Vec<u16> = (0..32).map(|i| f16(i as f32 * 0.5 - 4.0)).collect();
    let b: Vec<u16> = (0..32).map(|i| f16(3.0 - (i % 5) as f32)).collect();
    let (x, y, z) = (Buffer::of(&a), Buffer::of(&b), Buffer::zeroed(64));
    rig.map(&[&x, &y, &z]);
    rig.run("half_ops", shape(1, 32), Params::new().buf(&x).buf(&y).buf(&z).put(32i32));
    for i in 0..32 {
        let (x, y) = (f64::from(i as i32) * 0.5 - 4.0, 3.0 - f64::from(i as i32 % 5));
        let c = if x < y { x / y } else { x * y + x.exp() };
        let expected = c.max(x.min(y));
        let h = z.get::<u16>(i);
        if expected > 65520.0 {
            assert_eq!(h, 0x7c00);
            continue;
        }
        let (e, m) = (i32::from(h >> 10 & 31), f64::from(h & 1023));
        let magnitude = if e == 0 { m * 2f64.powi(-24) } else { (1.0 + m / 1024.0) * 2f64.powi(e - 15) };
        let got = if h >> 15 == 1 { -magnitude } else { magnitude };
        assert!(
            (got - expected).abs() <= expected.abs() * 2e-3 + 1e-6 || (x < y && y == 0.0),
            "{x} {y}: {got} {expected}"
        );
    }
}

/// As tinygrad writes it.
#[test]
fn first_element_of_an_array_has_the_address_of_the_array() {
    const TEXT: &str = r"
.version 7.5
.target sm_80
.address_size 64
.visible .entry swap(.param .u64 data)
{
    .reg .u64 %d<4>;
    .reg .u32 %r<4>;
    .shared .align 16 .b8 local0[64];
    ld.param.u64 %d0, [data+0];
    mov.u64 %d1, local0[0];
    mov.u32 %r0, %tid.x;
    mad.wide.u32 %d2, %r0, 4, %d1;
    st.shared.u32 [%d2], %r0;
    bar.sync 0;
    xor.b32 %r1, %r0, 1;
    mad.wide.u32 %d2, %r1, 4, %d1;
    ld.shared.u32 %r2, [%d2];
    mad.wide.u32 %d3, %r0, 4, %d0;
    st.global.u32 [%d3], %r2;
    ret;
}
";
    let mut rig = Rig::new(TEXT);
    let out = Buffer::zeroed(64);
    rig.map(&[&out]);
    rig.run("swap", shape(1, 16), Params::new().buf(&out));
    let expected: Vec<u32> = (0..16).map(|i| i ^ 1).collect();
    assert_eq!(out.all::<u32>(), expected);
}

// Promise: S87
#[test]
fn kernel_is_charged_for_the_shared_variables_that_it_and_its_functions_name() {
    let rig = Rig::new(
        ".version 8.0\n.target sm_80\n.address_size 64\n\
         .shared .align 4 .b8 one[1000]; .shared .align 4 .b8 two[2000]; .shared .align 4 .b8 three[4000];\n\
         .func leaf() { .reg .u32 %r; .shared .align 4 .b8 own[100]; ld.shared.u32 %r, [three]; st.shared.u32 [own], %r; ret; }\n\
         .func caller() { call.uni leaf, (); ret; }\n\
         .func plain() { ret; }\n\
         .visible .entry none() { call.uni plain, (); ret; }\n\
         .visible .entry first() { .reg .u32 %r; ld.shared.u32 %r, [one+4]; ret; }\n\
         .visible .entry second() { .reg .u64 %d; mov.u64 %d, two; ret; }\n\
         .visible .entry through() { .reg .u32 %r; call.uni caller, (); ld.shared.u32 %r, [one]; ret; }\n\
         .visible .entry shares(.param .u64 out) { .reg .u32 %r<4>; .reg .u64 %d;\n\
           mov.u32 %r1, 7; st.shared.u32 [one], %r1; mov.u32 %r1, 9; st.shared.u32 [three], %r1;\n\
           call.uni caller, (); ld.shared.u32 %r2, [one]; ld.shared.u32 %r3, [three]; mad.lo.u32 %r1, %r2, 100, %r3;\n\
           ld.param.u64 %d, [out]; st.global.u32 [%d], %r1; ret; }\n\
         .visible .entry pointed(.param .u64 f) { .reg .u64 %d; .reg .u32 %r; ld.param.u64 %d, [f]; ld.shared.u32 %r, [two];\n\
           p: .callprototype _ (); call %d, (), p; ret; }\n",
    );
    let charged = |name: &str| {
        let kernels = rig.linked.module().kernels();
        kernels.iter().find(|kernel| kernel.name == name).expect("a kernel").static_shared
    };
    assert_eq!((charged("none"), charged("first"), charged("second")), (0, 1000, 2000));
    // A function of the kernel has two variables.
    assert_eq!((charged("through"), charged("shares")), (4100 + 1000, 4100 + 1000));
    assert_eq!(charged("pointed"), 4100 + 2000, "any function may be called");
    let output = Buffer::zeroed(4);
    let mut rig = rig;
    rig.map(&[&output]);
    rig.run("shares", shape(1, 1), Params::new().buf(&output));
    assert_eq!(output.get::<u32>(0), 709, "each variable has a place of its own");
}
