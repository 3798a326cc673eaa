//! Filters, address modes, levels of detail and cubes.

use softgpu_engine::{AddressMode, ChannelType, Filter, Format, Sampler, Shape};

use super::reference::{filtered, near};
use super::{Array, Extents, fetch, float, noise, plain};

const MODES: [AddressMode; 4] =
    [AddressMode::Wrap, AddressMode::Clamp, AddressMode::Mirror, AddressMode::Border];

/// A value in a texel that depends on everything.
fn value([level, x, y, slice, c]: [u32; 5]) -> u32 {
    let n = level * 7919 + x * 31 + y * 577 + slice * 131 + c * 17;
    ((n % 509) as f32 / 4.0 - 60.0).to_bits()
}

#[test]
fn filters_and_address_modes_give_the_values_of_the_programming_guide() {
    let mut random = noise(1);
    let cases = [
        (Shape::D1, "1d", "{%c0}", Extents(13, 1, 1, 1, 1), 1usize),
        (Shape::D2, "2d", "{%c0, %c1}", Extents(7, 5, 1, 1, 1), 2),
        (Shape::D3, "3d", "{%c0, %c1, %c2, %c2}", Extents(6, 3, 5, 1, 1), 3),
    ];
    for (kind, geometry, coordinates, extents, dimensions) in cases {
        let array = Array::new(kind, float(4), extents).paint(value);
        let sizes = [i64::from(extents.0), i64::from(extents.1), i64::from(extents.2)];
        for (n, mode) in MODES.into_iter().enumerate() {
            for filter in [Filter::Point, Filter::Linear] {
                for normalized in [false, true] {
                    let address = [mode, MODES[(n + 1) % 4], MODES[(n + 2) % 4]];
                    let border = [3.0, -7.0, 0.5, 9.0];
                    let sampler = Sampler { address, filter, normalized, border, ..plain() };
                    let inputs: Vec<[u32; 4]> = (0..96)
                        .map(|_| {
                            core::array::from_fn(|axis| {
                                let x = random() as f32 / u32::MAX as f32 * 4.0 - 1.5;
                                let size = sizes.get(axis).copied().unwrap_or(1) as f32;
                                (if normalized { x } else { x * size }).to_bits()
                            })
                        })
                        .collect();
                    let text =
                        format!("tex.{geometry}.v4.f32.f32 {{%r0, %r1, %r2, %r3}}, [%h, {coordinates}];");
                    for (input, got) in inputs.iter().zip(fetch(&array, sampler, &text, &inputs)) {
                        let at: Vec<f64> =
                            input[..dimensions].iter().map(|v| f64::from(f32::from_bits(*v))).collect();
                        for (c, word) in got.into_iter().enumerate() {
                            let texel = |place: &[Option<i64>]| {
                                let mut whole = [0u32; 3];
                                for (to, i) in whole.iter_mut().zip(place) {
                                    match i {
                                        Some(i) => *to = *i as u32,
                                        None => return f64::from(border[c]),
                                    }
                                }
                                let [x, y, z] = whole;
                                f64::from(f32::from_bits(value([0, x, y, z, c as u32])))
                            };
                            let wanted = filtered(&sampler, &sizes[..dimensions], &at, &texel);
                            assert!(
                                near(word, wanted),
                                "{geometry} {sampler:?} at {at:?}: {} instead of {wanted}",
                                f32::from_bits(word)
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn layers_are_not_filtered_and_clamp() {
    let sampler = Sampler { filter: Filter::Linear, ..plain() };
    let one = Array::new(Shape::D1Layered, float(1), Extents(4, 1, 1, 3, 1)).paint(value);
    let two = Array::new(Shape::D2Layered, float(1), Extents(4, 2, 1, 3, 1)).paint(value);
    let inputs: Vec<[u32; 4]> =
        [0, 1, 2, 3, 900, u32::MAX].map(|layer| [layer, 1.5f32.to_bits(), 0.5f32.to_bits(), 0]).to_vec();
    let got = fetch(&one, sampler, "tex.a1d.v4.f32.f32 {%r0, _, _, _}, [%h, {%c0, %c1}];", &inputs);
    for (input, got) in inputs.iter().zip(got) {
        assert_eq!(got[0], value([0, 1, 0, input[0].min(2), 0]));
    }
    let text = "tex.a2d.v4.f32.f32 {%r0, _, _, _}, [%h, {%c0, %c1, %c2, %c2}];";
    for (input, got) in inputs.iter().zip(fetch(&two, sampler, text, &inputs)) {
        assert_eq!(got[0], value([0, 1, 0, input[0].min(2), 0]));
    }
}

#[test]
fn weights_have_eight_bits_so_that_a_gather_takes_the_texels_of_a_rounded_weight() {
    let array = Array::new(Shape::D2, float(1), Extents(8, 8, 1, 1, 1))
        .paint(|[_, x, y, _, _]| (x as f32 + 10.0 * y as f32).to_bits());
    // The example of the guide: 2.49805 - 0.5 has a fraction nearer to 256/256 than to 255/256.
    let inputs =
        [[2.498_046_9f32.to_bits(), 1.2f32.to_bits(), 0, 0], [2.4f32.to_bits(), 1.2f32.to_bits(), 0, 0]];
    let text = "tld4.r.2d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%h, {%c0, %c1}];";
    let got = fetch(&array, plain(), text, &inputs);
    assert_eq!(got[0].map(f32::from_bits), [12.0, 13.0, 3.0, 2.0]);
    assert_eq!(got[1].map(f32::from_bits), [11.0, 12.0, 2.0, 1.0]);
    let text = "tld4.r.2d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%h, {%c0, %c1}], {2, 1};";
    assert_eq!(fetch(&array, plain(), text, &inputs)[1].map(f32::from_bits), [23.0, 24.0, 14.0, 13.0]);
}

#[test]
fn gather_takes_the_named_channel_and_the_layer() {
    let array = Array::new(Shape::D2Layered, float(4), Extents(4, 4, 1, 2, 1)).paint(value);
    for (c, name) in (0..).zip(["r", "g", "b", "a"]) {
        let text =
            format!("tld4.{name}.a2d.v4.f32.f32 {{%r0, %r1, %r2, %r3}}, [%h, {{%c0, %c1, %c2, %c2}}];");
        let got = fetch(&array, plain(), &text, &[[1, 2.0f32.to_bits(), 3.0f32.to_bits(), 0]]);
        let wanted = [(1, 3), (2, 3), (2, 2), (1, 2)].map(|(x, y)| value([0, x, y, 1, c]));
        assert_eq!(got[0], wanted);
    }
}

/// A texture whose texels are the number of their level.
fn mips() -> Array {
    Array::new(Shape::D2, float(1), Extents(16, 16, 1, 1, 5)).paint(|[level, ..]| (level as f32).to_bits())
}

#[test]
fn levels_of_detail_are_biased_clamped_and_filtered() {
    let array = mips();
    let base = Sampler { normalized: true, ..plain() };
    let level = |sampler: Sampler, lod: f32| {
        let text = "tex.level.2d.v4.f32.f32 {%r0, _, _, _}, [%h, {%c0, %c1}], %c2;";
        let inputs = [[0.3f32.to_bits(), 0.6f32.to_bits(), lod.to_bits(), 0]];
        f32::from_bits(fetch(&array, sampler, text, &inputs)[0][0])
    };
    for (lod, wanted) in [(-3.0, 0.0), (0.4, 0.0), (0.6, 1.0), (2.0, 2.0), (3.7, 4.0), (90.0, 4.0)] {
        assert!((level(base, lod) - wanted).abs() < 1e-6, "nearest level of {lod}");
    }
    assert!(level(base, f32::NAN).abs() < 1e-6);
    let linear = Sampler { mip_filter: Filter::Linear, ..base };
    for (lod, wanted) in [(-1.0, 0.0), (0.25, 0.25), (1.5, 1.5), (3.999, 4.0), (5.0, 4.0)] {
        assert!((level(linear, lod) - wanted).abs() < 1e-6, "levels around {lod}");
    }
    assert!((level(Sampler { mip_bias: 1.25, ..linear }, 0.5) - 1.75).abs() < 1e-6);
    let limited = Sampler { mip_clamp: [0.75, 2.5], ..linear };
    assert!((level(limited, 0.0) - 0.75).abs() < 1e-6);
    assert!((level(limited, 4.0) - 2.5).abs() < 1e-6);
    let text = "tex.2d.v4.f32.f32 {%r0, _, _, _}, [%h, {%c0, %c1}];";
    let biased = Sampler { mip_bias: 2.0, ..linear };
    assert_eq!(
        fetch(&array, biased, text, &[[0; 4]])[0][0],
        0,
        "no level is given, so the first one is read"
    );
}

#[test]
fn derivatives_select_the_level_whose_texels_they_step_over() {
    let array = mips();
    let sampler = Sampler { normalized: true, mip_filter: Filter::Linear, ..plain() };
    let text = "mov.f32 %f0, 0f00000000;\n\
                tex.grad.2d.v4.f32.f32 {%r0, _, _, _}, [%h, {%f0, %f0}], {%c0, %c1}, {%c2, %c3};";
    let steps = |texels: f32| (texels / 16.0).to_bits();
    let inputs = [
        [steps(1.0), 0, 0, steps(1.0)],
        [steps(4.0), 0, 0, steps(1.0)],
        [steps(3.0), steps(4.0), 0, 0],
        [0, 0, 0, 0],
        [0, 0, steps(100.0), 0],
    ];
    let got = fetch(&array, sampler, text, &inputs);
    let wanted = [0.0, 2.0, 5f64.log2(), 0.0, 4.0];
    for (got, wanted) in got.iter().zip(wanted) {
        assert!((f64::from(f32::from_bits(got[0])) - wanted).abs() < 1.0 / 256.0);
    }
}

#[test]
fn cube_reads_the_face_of_the_longest_component() {
    let array = Array::new(Shape::CubeLayered, float(1), Extents(4, 4, 1, 2, 1)).paint(value);
    // Directions with the face and the texel that the guide's table gives.
    let cases = [
        ([2.0, 0.2, 0.3], 0, (1, 1)),
        ([-2.0, 0.2, 0.3], 1, (2, 1)),
        ([0.2, 2.0, 0.3], 2, (2, 2)),
        ([0.2, -2.0, 0.3], 3, (2, 1)),
        ([1.9, 0.3, 2.0], 4, (3, 1)),
        ([0.2, 0.3, -2.0], 5, (1, 1)),
    ];
    for layer in 0..2 {
        let inputs: Vec<[u32; 4]> = cases
            .iter()
            .map(|(d, ..)| {
                let [x, y, z] = d.map(|v: f32| v.to_bits());
                [layer, x, y, z]
            })
            .collect();
        let text = "tex.acube.v4.f32.f32 {%r0, _, _, _}, [%h, {%c0, %c1, %c2, %c3}];";
        for ((_, face, (x, y)), got) in cases.iter().zip(fetch(&array, plain(), text, &inputs)) {
            assert_eq!(got[0], value([0, *x, *y, layer * 6 + face, 0]), "face {face}");
        }
    }
}

#[test]
fn filtered_cube_is_continuous_across_its_edges_and_corners() {
    // The face coordinates of each texel make it the value of a linear function of the direction, divided by its longest
    // component. That function is continuous on the cube, so a seamless filter is close to it everywhere.
    let n = 32;
    let direction = |face: u32, x: f64, y: f64| {
        let (u, v) = (2.0 * x - 1.0, 2.0 * y - 1.0);
        match face {
            0 => [1.0, -v, -u],
            1 => [-1.0, -v, u],
            2 => [u, 1.0, v],
            3 => [u, -1.0, -v],
            4 => [u, -v, 1.0],
            _ => [-u, -v, -1.0],
        }
    };
    let linear = |d: [f64; 3]| {
        let most = d.iter().fold(0.0f64, |m, v| m.max(v.abs()));
        (d[0] + 2.0 * d[1] - 3.0 * d[2]) / most
    };
    let array = Array::new(Shape::Cube, float(1), Extents(n, n, 1, 1, 1)).paint(|[_, x, y, face, _]| {
        let centre = |i: u32| (f64::from(i) + 0.5) / f64::from(n);
        (linear(direction(face, centre(x), centre(y))) as f32).to_bits()
    });
    let sampler = Sampler { filter: Filter::Linear, ..plain() };
    let mut random = noise(5);
    let bits = |d: [f32; 3]| [d[0].to_bits(), d[1].to_bits(), d[2].to_bits(), 0];
    let mut inputs = Vec::new();
    for turn in 0..1500 {
        let mut d: [f32; 3] = core::array::from_fn(|_| random() as f32 / u32::MAX as f32 * 2.0 - 1.0);
        let sign = if turn % 4 < 2 { 1.0 } else { -1.0 };
        // Two of the largest components are equal, up to a trifle in both directions: both sides of an edge.
        let (a, b) = (turn % 3, (turn + 1) % 3);
        if turn % 5 > 0 {
            d[a] = 1.0;
            d[b] = sign * 0.9999;
            inputs.push(bits(d));
            d[b] = sign * 1.0001;
        }
        // Three of them are a corner.
        if turn % 5 == 4 {
            d[(turn + 2) % 3] = sign;
        }
        inputs.push(bits(d));
    }
    let text = "tex.cube.v4.f32.f32 {%r0, _, _, _}, [%h, {%c0, %c1, %c2, %c2}];";
    let mut last: Option<([f64; 3], f64)> = None;
    for (input, got) in inputs.iter().zip(fetch(&array, sampler, text, &inputs)) {
        let d = [0, 1, 2].map(|n| f64::from(f32::from_bits(input[n])));
        let (got, wanted) = (f64::from(f32::from_bits(got[0])), linear(d));
        // Half a texel along the normal of each side.
        assert!((got - wanted).abs() < 6.0 / f64::from(n), "at {d:?}: {got} instead of {wanted}");
        if let Some((other, value)) = last.replace((d, got))
            && d.iter().zip(other).all(|(a, b)| (a - b).abs() < 0.001)
        {
            assert!((value - got).abs() < 0.01, "{value} and {got} beside the edge at {d:?}");
        }
    }
}

#[test]
fn coordinates_that_are_no_numbers_read_a_texel_or_the_border() {
    let format = Format { channel: ChannelType::U32, channels: 1 };
    let array = Array::new(Shape::D3, format, Extents(3, 4, 5, 1, 1)).paint(|_| 7);
    let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, -1e30, f32::MIN_POSITIVE, -0.0, 1.0];
    let inputs: Vec<[u32; 4]> = odd
        .iter()
        .flat_map(|x| odd.iter().map(move |y| [x.to_bits(), y.to_bits(), x.to_bits(), 0]))
        .collect();
    for mode in MODES {
        for normalized in [false, true] {
            let border = [f32::from_bits(9); 4];
            let sampler = Sampler { address: [mode; 3], normalized, border, ..plain() };
            let text = "tex.3d.v4.u32.f32 {%r0, _, _, _}, [%h, {%c0, %c1, %c2, %c2}];";
            for got in fetch(&array, sampler, text, &inputs) {
                assert!(got[0] == 7 || mode == AddressMode::Border && got[0] == 9, "{mode:?}: {}", got[0]);
            }
        }
    }
}
