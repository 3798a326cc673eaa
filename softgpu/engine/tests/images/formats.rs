//! The formats of texels, in textures and in formatted stores.

use softgpu_engine::{ChannelType, Filter, Format, Sampler, Shape};

use super::{Array, Extents, fetch, on_surface, plain};

const LOAD: &str = "tex.1d.v4.u32.s32 {%r0, %r1, %r2, %r3}, [%h, {%c0}];";

fn row(channel: ChannelType, channels: u8, bits: &[u32]) -> Array {
    let format = Format { channel, channels };
    let width = bits.len() as u32 / u32::from(channels);
    Array::new(Shape::D1, format, Extents(width, 1, 1, 1, 1))
        .paint(|[_, x, _, _, c]| bits[(x * u32::from(channels) + c) as usize])
}

fn words(channel: ChannelType, bits: &[u32], sampler: Sampler) -> Vec<u32> {
    let inputs: Vec<[u32; 4]> = (0..bits.len() as u32).map(|x| [x, 0, 0, 0]).collect();
    fetch(&row(channel, 1, bits), sampler, LOAD, &inputs).iter().map(|v| v[0]).collect()
}

#[test]
fn integers_are_read_as_they_are_or_as_fractions() {
    let promoted = Sampler { promote: true, ..plain() };
    let bits = [0, 1, 0x7f, 0x80, 0x81, 0xff, 0x7fff, 0x8000, 0x8001, 0xffff, 0x7fff_ffff, 0x8000_0000, !0];
    let floats = |v: Vec<u32>| v.into_iter().map(|v| f64::from(f32::from_bits(v))).collect::<Vec<_>>();
    let close = |a: Vec<f64>, b: Vec<f64>| a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-7);
    let of = |f: fn(u32) -> u32| bits.map(f).to_vec();
    let fractions = |f: fn(u32) -> f64| bits.map(f).to_vec();
    assert_eq!(words(ChannelType::U8, &bits, plain()), of(|v| v & 0xff));
    assert_eq!(words(ChannelType::S8, &bits, plain()), of(|v| i32::from(v as u8 as i8) as u32));
    assert_eq!(words(ChannelType::U16, &bits, plain()), of(|v| v & 0xffff));
    assert_eq!(words(ChannelType::S16, &bits, plain()), of(|v| i32::from(v as u16 as i16) as u32));
    for channel in [ChannelType::U32, ChannelType::S32, ChannelType::F32] {
        assert_eq!(words(channel, &bits, plain()), of(|v| v));
        assert_eq!(words(channel, &bits, promoted)[..10], of(|v| v)[..10], "32 bits are never promoted");
    }
    let unsigned8 = fractions(|v| f64::from(v & 0xff) / 255.0);
    let unsigned16 = fractions(|v| f64::from(v & 0xffff) / 65535.0);
    let signed8 = fractions(|v| (f64::from(v as u8 as i8) / 127.0).max(-1.0));
    let signed16 = fractions(|v| (f64::from(v as u16 as i16) / 32767.0).max(-1.0));
    assert!(close(floats(words(ChannelType::U8, &bits, promoted)), unsigned8.clone()));
    assert!(close(floats(words(ChannelType::U16, &bits, promoted)), unsigned16.clone()));
    assert!(close(floats(words(ChannelType::S8, &bits, promoted)), signed8.clone()));
    assert!(close(floats(words(ChannelType::S16, &bits, promoted)), signed16.clone()));
    assert!(close(floats(words(ChannelType::Unorm8, &bits, plain())), unsigned8));
    assert!(close(floats(words(ChannelType::Unorm16, &bits, plain())), unsigned16));
    assert!(close(floats(words(ChannelType::Snorm8, &bits, plain())), signed8));
    assert!(close(floats(words(ChannelType::Snorm16, &bits, plain())), signed16));
}

#[test]
fn halves_are_read_as_floats_and_packed_on_request() {
    let bits = [0x3c00, 0xc000, 0x3555, 0x7bff];
    let array = row(ChannelType::F16, 4, &bits);
    let wanted = [1.0, -2.0, 0.333_251_95, 65504.0];
    assert_eq!(fetch(&array, plain(), LOAD, &[[0; 4]])[0].map(f32::from_bits), wanted);
    let pairs = "tex.1d.v2.f16x2.s32 {%r0, %r1}, [%h, {%c0}];";
    assert_eq!(fetch(&array, plain(), pairs, &[[0; 4]])[0][..2], [0xc000_3c00, 0x7bff_3555]);
    let halves = "tex.1d.v4.f16.s32 {%s0, %s1, %s2, %s3}, [%h, {%c0}];\n\
                  cvt.u32.u16 %r0, %s0; cvt.u32.u16 %r1, %s1; cvt.u32.u16 %r2, %s2; cvt.u32.u16 %r3, %s3;";
    assert_eq!(fetch(&array, plain(), halves, &[[0; 4]])[0], bits);
}

#[test]
fn channels_that_a_format_lacks_are_zero_and_one() {
    let one = row(ChannelType::U32, 1, &[5]);
    assert_eq!(fetch(&one, plain(), LOAD, &[[0; 4]])[0], [5, 0, 0, 1]);
    let two = row(ChannelType::F32, 2, &[5, 6]);
    assert_eq!(fetch(&two, plain(), LOAD, &[[0; 4]])[0], [5, 6, 0, 1.0f32.to_bits()]);
}

#[test]
fn integer_coordinates_outside_the_image_read_zero() {
    let array = row(ChannelType::U32, 1, &[5, 6, 7]);
    let inputs = [3, 4, u32::MAX, 0x7fff_ffff, 0x8000_0000].map(|x| [x, 0, 0, 0]);
    assert!(fetch(&array, plain(), LOAD, &inputs).iter().all(|v| v[0] == 0));
    let offset = "tex.1d.v4.u32.s32 {%r0, _, _, _}, [%h, {%c0}], {2};";
    assert_eq!(fetch(&array, plain(), offset, &[[0; 4], [1, 0, 0, 0]]).map_first(), [7, 0]);
}

trait First {
    fn map_first(&self) -> Vec<u32>;
}

impl First for Vec<[u32; 4]> {
    fn map_first(&self) -> Vec<u32> {
        self.iter().map(|v| v[0]).collect()
    }
}

#[test]
fn integers_are_never_filtered() {
    let array = row(ChannelType::U8, 1, &[10, 200]);
    let linear = Sampler { filter: Filter::Linear, ..plain() };
    let text = "tex.1d.v4.u32.f32 {%r0, _, _, _}, [%h, {%c0}];";
    assert_eq!(fetch(&array, linear, text, &[[1.0f32.to_bits(), 0, 0, 0]])[0][0], 200);
    let text = "tex.1d.v4.f32.f32 {%r0, _, _, _}, [%h, {%c0}];";
    let promoted = Sampler { promote: true, ..linear };
    let half = f32::from_bits(fetch(&array, promoted, text, &[[1.0f32.to_bits(), 0, 0, 0]])[0][0]);
    assert!((half - 105.0 / 255.0).abs() < 1e-6);
}

#[test]
fn srgb_is_decoded_before_the_filter_and_not_for_the_last_channel() {
    let array = row(ChannelType::U8, 4, &[0, 128, 255, 128]);
    let sampler = Sampler { promote: true, srgb: true, ..plain() };
    let got = fetch(&array, sampler, LOAD, &[[0; 4]])[0].map(f32::from_bits);
    for (got, wanted) in got.iter().zip([0.0, 0.215_860_5, 1.0, 128.0 / 255.0]) {
        assert!((got - wanted).abs() < 1e-6);
    }
}

#[test]
fn formatted_store_converts_to_the_format_of_the_surface() {
    let cases: [(ChannelType, [u32; 4], [u32; 4]); 8] = [
        (ChannelType::U8, [0, 255, 256, !0], [0, 255, 255, 255]),
        (ChannelType::S8, [5, (-128i32) as u32, 500, (-500i32) as u32], [5, 0x80, 0x7f, 0x80]),
        (ChannelType::U16, [1, 0xffff, 0x1_0000, 7], [1, 0xffff, 0xffff, 7]),
        (ChannelType::U32, [1, 2, 3, !0], [1, 2, 3, !0]),
        (ChannelType::F32, [1.5f32.to_bits(), 1, 2, 3], [1.5f32.to_bits(), 1, 2, 3]),
        (ChannelType::F16, [1.5, -2.0, 0.0, 1e9].map(f32::to_bits), [0x3e00, 0xc000, 0, 0x7c00]),
        (ChannelType::Unorm8, [0.5, -1.0, 2.0, f32::NAN].map(f32::to_bits), [128, 0, 255, 0]),
        (ChannelType::Snorm16, [0.5, -1.0, -2.0, 1.0].map(f32::to_bits), [16384, 0x8001, 0x8001, 0x7fff]),
    ];
    for (channel, source, wanted) in cases {
        let array = Array::new(Shape::D2, Format { channel, channels: 4 }, Extents(4, 3, 1, 1, 1));
        let text = "mov.s32 %n, 2; mov.s32 %m, 1;\n\
                    sust.p.2d.v4.b32.trap [%h, {%n, %m}], {%c0, %c1, %c2, %c3};";
        on_surface(&array, text, &[source]).expect("runs");
        assert_eq!([0, 1, 2, 3].map(|c| array.channel(0, 2, 1, 0, c)), wanted, "{channel:?}");
        assert!(array.surroundings_are_whole());
    }
}
