//! Surface loads, stores and reductions, inside and outside the surface.

use proptest::prelude::*;
use softgpu_engine::{ChannelType, FaultKind, Format, Shape};

use super::{Array, Extents, noise, on_surface};

fn words(kind: Shape, extents: Extents) -> Array {
    Array::new(kind, Format { channel: ChannelType::U32, channels: 1 }, extents)
}

fn number([_, x, y, slice, _]: [u32; 5]) -> u32 {
    1000 * slice + 10 * y + x + 1
}

/// Geometries: shape, name, extents, and the coordinates of a byte offset, a row and a slice.
const GEOMETRIES: [(Shape, &str, Extents, &str); 5] = [
    (Shape::D1, "1d", Extents(5, 1, 1, 1, 1), "{%c0}"),
    (Shape::D2, "2d", Extents(5, 4, 1, 1, 1), "{%c0, %c1}"),
    (Shape::D3, "3d", Extents(5, 4, 3, 1, 1), "{%c0, %c1, %c2, %c2}"),
    (Shape::D1Layered, "a1d", Extents(5, 1, 1, 3, 1), "{%c2, %c0}"),
    (Shape::D2Layered, "a2d", Extents(5, 4, 1, 3, 1), "{%c2, %c0, %c1, %c1}"),
];

#[test]
fn loads_and_stores_move_the_element_at_a_byte_offset() {
    for (kind, geometry, extents, place) in GEOMETRIES {
        let array = words(kind, extents).paint(number);
        let (h, d) = (extents.1, extents.2.max(extents.3));
        let inputs: Vec<[u32; 4]> = (0..d)
            .flat_map(|z| {
                (0..h).flat_map(move |y| (0..5).map(move |x| [x * 4, y, z, 7 * (x + y * 9 + z * 90)]))
            })
            .collect();
        let text = format!(
            "suld.b.{geometry}.b32.trap {{%r0}}, [%h, {place}];\nsust.b.{geometry}.b32.trap [%h, {place}], {{%c3}};\n\
             suld.b.{geometry}.b32.trap %r1, [%h, {place}];"
        );
        // The last warp repeats the first input, whose value is the same.
        let got = on_surface(&array, &text, &inputs).expect("runs");
        for ([x, y, z, v], got) in inputs.iter().zip(got) {
            if [*x, *y, *z] != [0; 3] {
                assert_eq!(got[..2], [number([0, x / 4, *y, *z, 0]), *v], "{geometry} {x} {y} {z}");
            }
            assert_eq!(array.channel(0, x / 4, *y, *z, 0), *v);
        }
        assert!(array.surroundings_are_whole());
    }
}

#[test]
fn elements_of_every_size_are_loaded_and_stored() {
    let array =
        Array::new(Shape::D1, Format { channel: ChannelType::U32, channels: 4 }, Extents(4, 1, 1, 1, 1))
            .paint(|[_, x, _, _, c]| 0x0101_0101 * (x * 4 + c + 0x80));
    let text = "suld.b.1d.b8.trap %s0, [%h, {16}]; cvt.u32.u16 %r0, %s0;\n\
                suld.b.1d.v2.b16.trap {%s0, %s1}, [%h, {20}]; cvt.u32.u16 %r1, %s1;\n\
                suld.b.1d.v2.b64.trap {%w0, %w1}, [%h, {32}]; cvt.u32.u64 %r2, %w0; shr.u64 %w1, %w1, 32; cvt.u32.u64 %r3, %w1;\n\
                sust.b.1d.v4.b8.trap [%h, {0}], {%s0, %s1, %s0, %s1};\n\
                sust.b.1d.v2.b64.trap [%h, {48}], {%w0, %w0};";
    let got = on_surface(&array, text, &[[0; 4]]).expect("runs")[0];
    assert_eq!(got, [0x84, 0x8585, 0x8888_8888, 0x8b8b_8b8b]);
    assert_eq!(array.channel(0, 0, 0, 0, 0), 0x8585_8585);
    assert_eq!(
        [0, 1, 2, 3].map(|c| array.channel(0, 3, 0, 0, c)),
        [0x8888_8888, 0x8989_8989, 0x8888_8888, 0x8989_8989]
    );
}

#[test]
fn coordinates_outside_trap_clamp_or_give_zero() {
    for (kind, geometry, extents, place) in GEOMETRIES {
        let (h, d) = (extents.1, extents.2.max(extents.3));
        let mut outside = vec![[20, 0, 0], [u32::MAX - 3, 0, 0], [0x7fff_fffc, 0, 0]];
        if h > 1 {
            outside.extend([[0, h, 0], [0, u32::MAX, 0]]);
        }
        if d > 1 {
            outside.extend([[0, 0, d], [0, 0, 0x8000_0000]]);
        }
        for [x, y, z] in outside {
            let input = [[x, y, z, 77]];
            let access = |op: &str, mode: &str| match op {
                "suld" => format!("mov.u32 %r0, 5; suld.b.{geometry}.b32.{mode} {{%r0}}, [%h, {place}];"),
                "sust" => format!("sust.b.{geometry}.b32.{mode} [%h, {place}], {{%c3}};"),
                _ => format!("sured.b.add.{geometry}.u32.{mode} [%h, {place}], %c3;"),
            };
            let edge = |v: u32, n: u32| v.cast_signed().clamp(0, n.cast_signed() - 1).cast_unsigned();
            let (cx, cy, cz) = (edge(x, 17) / 4, edge(y, h), edge(z, d));
            for op in ["suld", "sust", "sured"] {
                let array = words(kind, extents).paint(number);
                let fault = on_surface(&array, &access(op, "trap"), &input).expect_err("outside");
                assert_eq!(fault.kind, FaultKind::LaunchFailed, "{op} {geometry}");
                let zero = on_surface(&array, &access(op, "zero"), &input).expect("runs")[0][0];
                assert_eq!(zero, 0);
                assert_eq!(array.channel(0, cx, cy, cz, 0), number([0, cx, cy, cz, 0]), "nothing is stored");
                let clamped = on_surface(&array, &access(op, "clamp"), &input).expect("runs")[0][0];
                match op {
                    "suld" => assert_eq!(clamped, number([0, cx, cy, cz, 0]), "{geometry}"),
                    "sust" => assert_eq!(array.channel(0, cx, cy, cz, 0), 77),
                    // All 32 threads of the warp have the same input.
                    _ => assert_eq!(array.channel(0, cx, cy, cz, 0), number([0, cx, cy, cz, 0]) + 32 * 77),
                }
                assert!(array.surroundings_are_whole());
            }
        }
    }
}

#[test]
fn access_not_aligned_to_its_size_faults() {
    let array = words(Shape::D1, Extents(5, 1, 1, 1, 1));
    for text in ["suld.b.1d.b32.zero %r0, [%h, {2}];", "sust.b.1d.v2.b32.clamp [%h, {4}], {%c0, %c1};"] {
        assert_eq!(on_surface(&array, text, &[[0; 4]]).expect_err("misaligned").kind, FaultKind::Misaligned);
    }
}

#[test]
fn reductions_are_atomic_between_the_threads_of_all_blocks() {
    let array = words(Shape::D2, Extents(3, 2, 1, 1, 1)).paint(|[_, x, ..]| if x == 1 { 0xffff } else { 40 });
    let inputs: Vec<[u32; 4]> = (0..2048u32).map(|n| [0, 1, n % 64, 0]).collect();
    let text = "sured.b.add.2d.u32.trap [%h, {0, %c1}], %c2;\n\
                sured.b.and.2d.b32.trap [%h, {4, %c1}], 0xff0f;\n\
                sured.p.max.2d.b32.trap [%h, {2, %c1}], %c2;\n\
                sured.p.min.2d.b32.trap [%h, {2, 0}], %c2;";
    on_surface(&array, text, &inputs).expect("runs");
    let sum: u32 = inputs.iter().map(|v| v[2]).sum();
    assert_eq!([0, 1, 2].map(|x| array.channel(0, x, 1, 0, 0)), [40 + sum, 0xff0f, 63]);
    assert_eq!([0, 1, 2].map(|x| array.channel(0, x, 0, 0, 0)), [40, 0xffff, 0]);
    let wide =
        Array::new(Shape::D1, Format { channel: ChannelType::U32, channels: 2 }, Extents(2, 1, 1, 1, 1))
            .paint(|[_, _, _, _, c]| if c == 0 { !0 } else { 0 });
    let text = "mov.u64 %w0, 1; sured.b.add.1d.u64.trap [%h, {8}], %w0;";
    on_surface(&wide, text, &[[0; 4]]).expect("runs");
    assert_eq!([0, 1].map(|c| wide.channel(0, 1, 0, 0, c)), [31, 1]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// No coordinates, in no mode and of no size, reach a byte that is no part of the surface.
    #[test]
    fn no_coordinates_leave_the_surface(
        geometry in 0usize..5,
        shape in 0usize..5,
        mode in 0usize..3,
        op in 0usize..4,
        seed in any::<u32>(),
        channels in prop::sample::select(vec![1u8, 2, 4]),
        channel in prop::sample::select(vec![ChannelType::U8, ChannelType::S16, ChannelType::F32]),
    ) {
        let (_, name, _, place) = GEOMETRIES[geometry];
        let (kind, _, extents, _) = GEOMETRIES[shape];
        let array = Array::new(kind, Format { channel, channels }, extents).paint(|_| 0);
        let mode = ["trap", "clamp", "zero"][mode];
        let text = match op {
            0 => format!("sust.b.{name}.v2.b32.{mode} [%h, {place}], {{%c3, %c3}};"),
            1 => format!("sust.p.{name}.v4.b32.{mode} [%h, {place}], {{%c3, %c3, %c3, %c3}};"),
            2 => format!("sured.b.add.{name}.u32.{mode} [%h, {place}], %c3;"),
            _ => format!("sust.b.{name}.b8.{mode} [%h, {place}], {{%s0}};\nsuld.b.{name}.v4.b32.{mode} {{%r0, %r1, %r2, %r3}}, [%h, {place}];"),
        };
        let mut random = noise(seed);
        let mut coordinate = || {
            let v = random();
            match v % 4 { 0 => v, 1 => (v >> 8) % 96, 2 => ((v >> 8) % 24).wrapping_sub(8), _ => (v >> 8) % 8 * 4 }
        };
        let inputs: Vec<[u32; 4]> = (0..64).map(|_| core::array::from_fn(|_| coordinate())).collect();
        let inputs: Vec<[u32; 4]> = inputs.iter().flat_map(|v| [*v; 32]).collect();
        match on_surface(&array, &text, &inputs) {
            Ok(got) => got.iter().flatten().for_each(|v| assert_ne!(*v, 0xeeee_eeee, "bytes outside were read")),
            Err(fault) => prop_assert!(
                matches!(fault.kind, FaultKind::LaunchFailed | FaultKind::Misaligned), "{}", fault
            ),
        }
        prop_assert!(array.surroundings_are_whole());
    }
}
