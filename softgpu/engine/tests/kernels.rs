//! Whole kernels of the project, compiled by nvcc, against plain Rust.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "test data"
)]

mod common;

use common::{Buffer, Params, Rig, shape};

const ELEMENTWISE: &str = include_str!("data/elementwise.ptx");
const COLLECTIVE: &str = include_str!("data/collective.ptx");

#[test]
fn vadd() {
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
fn reduce_shared_and_shfl() {
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
fn scan_and_sort() {
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
