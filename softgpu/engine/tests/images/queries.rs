//! Queries, handles, references, and the rules of images.

use std::collections::HashMap;
use std::sync::Arc;

use softgpu_engine::{
    AddressMode, ChannelType, FaultKind, Filter, Format, Image, ImageError, Level, LoadErrorKind, Module,
    Reference, ReferenceKind, Sampler, Shape, SourceUnit, Storage, Surface, Texture,
};

use super::{Array, Extents, Handles, SURFACE, TEXTURE, fetch, float, kernel, on_surface, plain, run};
use crate::common::Buffer;

fn asked(array: &Array, sampler: Sampler, query: &str) -> u32 {
    fetch(array, sampler, &format!("txq.{query}.b32 %r0, [%h];"), &[[0; 4]])[0][0]
}

#[test]
fn queries_answer_the_extents_and_the_sampler() {
    let format = Format { channel: ChannelType::Snorm8, channels: 4 };
    let address = [AddressMode::Mirror, AddressMode::Border, AddressMode::Wrap];
    let sampler = Sampler { address, filter: Filter::Linear, normalized: true, ..plain() };
    let two = Array::new(Shape::D2Layered, format, Extents(16, 9, 1, 3, 4));
    let wanted = [
        ("width", 16),
        ("height", 9),
        ("depth", 0),
        ("array_size", 3),
        ("num_mipmap_levels", 4),
        ("num_samples", 1),
        ("channel_data_type", 0xc8),
        ("channel_order", 4),
        ("normalized_coords", 1),
        ("force_unnormalized_coords", 0),
        ("filter_mode", 1),
        ("addr_mode_0", 1),
        ("addr_mode_1", 4),
        ("addr_mode_2", 0),
    ];
    for (query, wanted) in wanted {
        assert_eq!(asked(&two, sampler, query), wanted, "{query}");
    }
    let three = Array::new(Shape::D3, float(1), Extents(5, 6, 7, 1, 1));
    assert_eq!(["width", "height", "depth", "array_size"].map(|q| asked(&three, plain(), q)), [5, 6, 7, 0]);
    let level = "txq.level.width.b32 %r0, [%h], 2; txq.level.height.b32 %r1, [%h], %c0;";
    assert_eq!(fetch(&two, sampler, level, &[[1, 0, 0, 0]])[0][..2], [4, 4]);
    let surface = "suq.width.b32 %r0, [%h]; suq.array_size.b32 %r1, [%h]; suq.channel_data_type.b32 %r2, [%h]; \
                   suq.memory_layout.b32 %r3, [%h];";
    assert_eq!(on_surface(&two, surface, &[[0; 4]]).expect("runs")[0], [16, 3, 0xc8, 0]);
}

fn both() -> (Array, Handles) {
    let array = Array::new(Shape::D1, float(1), Extents(4, 1, 1, 1, 1)).paint(|[_, x, ..]| x + 1);
    let texture = Arc::new(Texture { image: Arc::clone(&array.image), sampler: plain() });
    let surface = Arc::new(Surface { image: Arc::clone(&array.image) });
    let handles = Handles {
        textures: HashMap::from([(TEXTURE, texture)]),
        surfaces: HashMap::from([(SURFACE, surface)]),
    };
    (array, handles)
}

#[test]
fn handle_unknown_or_of_another_kind_faults() {
    let texture = "tex.1d.v4.f32.s32 {%r0, _, _, _}, [%h, {0}];";
    let surface = "suld.b.1d.b32.zero %r0, [%h, {0}];";
    for (handle, text) in
        [(0, texture), (77, texture), (SURFACE, texture), (TEXTURE, surface), (u64::MAX, surface)]
    {
        let (_array, handles) = both();
        let fault = run(handles, handle, text, &[[0; 4]]).expect_err("no such handle");
        assert_eq!((fault.kind, fault.address), (FaultKind::IllegalAddress, handle));
    }
}

#[test]
fn lanes_may_have_different_handles() {
    let array = |v: u32| Array::new(Shape::D1, float(1), Extents(1, 1, 1, 1, 1)).paint(move |_| v);
    let arrays = [array(100), array(200), array(300)];
    let mut handles = Handles::default();
    for (n, array) in (0..).zip(&arrays) {
        let texture = Texture { image: Arc::clone(&array.image), sampler: plain() };
        handles.textures.insert(n, Arc::new(texture));
    }
    let text = "cvt.u64.u32 %w0, %c0; tex.1d.v4.f32.s32 {%r0, _, _, _}, [%w0, {0}];";
    let inputs: Vec<[u32; 4]> = (0..32).map(|n| [n * 7 % 3, 0, 0, 0]).collect();
    for (input, got) in inputs.iter().zip(run(handles, 0, text, &inputs).expect("runs")) {
        assert_eq!(got[0], (input[0] + 1) * 100);
    }
}

#[test]
fn istypep_tells_the_kind_of_a_handle() {
    let text = "istypep.texref %p, %h; selp.u32 %r0, 1, 0, %p; istypep.surfref %p, %h; selp.u32 %r1, 1, 0, %p;\n\
                istypep.samplerref %p, %h; selp.u32 %r2, 1, 0, %p;";
    for (handle, wanted) in [(TEXTURE, [1, 0, 0]), (SURFACE, [0, 1, 0]), (5, [0, 0, 0])] {
        let (_array, handles) = both();
        assert_eq!(run(handles, handle, text, &[[0; 4]]).expect("runs")[0][..3], wanted);
    }
}

#[test]
fn references_and_parameters_name_the_handle_that_the_launch_gives() {
    for base in ["tref", "p", "%w0"] {
        let text = format!(
            "mov.u64 %w0, tref; tex.1d.v4.f32.s32 {{%r0, _, _, _}}, [{base}, {{2}}]; txq.width.b32 %r1, [tref];"
        );
        let (_array, handles) = both();
        assert_eq!(run(handles, TEXTURE, &text, &[[0; 4]]).expect("runs")[0][..2], [3, 4], "{base}");
    }
    let (_array, handles) = both();
    let text = "suld.b.1d.b32.trap %r0, [sref, {4}];";
    assert_eq!(run(handles, SURFACE, text, &[[0; 4]]).expect("runs")[0][0], 2);
    let module = Module::load(kernel("").as_bytes(), 80).expect("loads");
    let named = |name: &str, kind, visible| Reference { name: name.to_owned(), kind, visible };
    let wanted = [named("tref", ReferenceKind::Texture, false), named("sref", ReferenceKind::Surface, true)];
    assert_eq!(module.references(), wanted);
}

#[test]
fn predicate_beside_the_vector_reports_resident_texels() {
    let (array, _) = both();
    let text =
        "setp.ne.u32 %p, 0, 0; tex.1d.v4.f32.s32 {%r0, _, _, _}|%p, [%h, {1}]; selp.u32 %r1, 1, 0, %p;";
    assert_eq!(fetch(&array, plain(), text, &[[0; 4]])[0][..2], [2, 1]);
}

#[test]
fn lanes_that_a_guard_excludes_keep_their_registers() {
    let (array, _) = both();
    let text = "setp.eq.u32 %p, %c0, 1; mov.u32 %r0, 55; @%p tex.1d.v4.f32.s32 {%r0, _, _, _}, [%h, {3}];";
    let inputs: Vec<[u32; 4]> = (0..32).map(|n| [n & 1, 0, 0, 0]).collect();
    for (input, got) in inputs.iter().zip(fetch(&array, plain(), text, &inputs)) {
        assert_eq!(got[0], if input[0] == 1 { 4 } else { 55 });
    }
}

#[test]
fn declared_reference_stands_for_the_definition_of_another_unit() {
    let header = ".version 8.0\n.target sm_80\n.address_size 64\n";
    let user = format!(
        "{header}.extern .global .texref t;\n.visible .entry k()\n{{\n.reg .b32 %r<4>;\n\
         tex.1d.v4.u32.s32 {{%r0, %r1, %r2, %r3}}, [t, {{0}}];\nret;\n}}\n"
    );
    let owner = format!("{header}.visible .global .texref t;\n");
    let unit = |text: &'static str| SourceUnit { text: text.as_bytes(), max_registers: None };
    let (user, owner): (&str, &str) = (user.leak(), owner.leak());
    let module = Module::load_units(&[unit(user), unit(owner)], 80).map_err(|(_, e)| e).expect("links");
    assert_eq!(module.references().len(), 1);
    let alone = Module::load(user.as_bytes(), 80).err().expect("nothing defines it");
    assert_eq!(alone.kind, LoadErrorKind::Link);
}

#[test]
fn linear_memory_must_be_mapped() {
    let bytes = Buffer::of(&[5u32, 6, 7, 8]);
    let text = "tex.1d.v4.u32.s32 {%r0, _, _, _}, [%h, {%c0}];";
    let level = Level { address: bytes.addr(), width: 4, height: 1, depth: 1, row_pitch: 0, slice_pitch: 0 };
    let format = Format { channel: ChannelType::U32, channels: 1 };
    let image = Image::new(Shape::D1, format, Storage::Memory, 1, vec![level]).expect("sound");
    let texture = Arc::new(Texture { image: Arc::new(image), sampler: plain() });
    let handles =
        || Handles { textures: HashMap::from([(TEXTURE, Arc::clone(&texture))]), ..Handles::default() };
    let fault = run(handles(), TEXTURE, text, &[[0; 4]]).expect_err("not mapped");
    assert_eq!(fault.kind, FaultKind::IllegalAddress);
    let mut rig = crate::common::Rig::new(&kernel(text));
    let (input, output) = (Buffer::of(&(0..128u32).map(|n| n / 4).collect::<Vec<_>>()), Buffer::zeroed(512));
    rig.map(&[&bytes, &input, &output]);
    rig.images = Box::new(handles());
    let params = crate::common::Params::new().put(TEXTURE).buf(&input).buf(&output).put(0u64);
    rig.run("k", crate::common::shape(1, 32), params);
    let got: Vec<u32> = output.all::<u32>().iter().step_by(4).copied().collect();
    assert_eq!(got[..6], [5, 6, 7, 8, 0, 0]);
}

#[test]
fn image_is_refused_if_a_level_leaves_its_storage() {
    let format = Format { channel: ChannelType::U16, channels: 2 };
    let level = Level { address: 0x1000, width: 8, height: 4, depth: 1, row_pitch: 32, slice_pitch: 128 };
    let array = |end: u64| Storage::Array(0x1000..end);
    let make = |format, storage, layers, level| {
        Image::new(Shape::D2Layered, format, storage, layers, vec![level]).err()
    };
    assert_eq!(make(format, array(0x1180), 3, level), None);
    assert_eq!(make(format, array(0x117f), 3, level), Some(ImageError::Outside));
    assert_eq!(make(format, Storage::Array(0x1004..0x2000), 3, level), Some(ImageError::Outside));
    assert_eq!(make(format, array(0x1180), 4, level), Some(ImageError::Outside));
    assert_eq!(make(format, array(0x1180), 0, level), Some(ImageError::Extent));
    for (wrong, error) in [
        (Level { width: 0, ..level }, ImageError::Extent),
        (Level { height: 1 << 18, ..level }, ImageError::Extent),
        (Level { depth: 2, ..level }, ImageError::Extent),
        (Level { address: 0x1002, ..level }, ImageError::Alignment),
        (Level { row_pitch: 33, ..level }, ImageError::Alignment),
        (Level { row_pitch: 28, ..level }, ImageError::Pitch),
        (Level { slice_pitch: 124, ..level }, ImageError::Pitch),
        (Level { slice_pitch: u64::MAX - 3, ..level }, ImageError::Outside),
        (Level { address: u64::MAX - 3, ..level }, ImageError::Outside),
        (Level { row_pitch: u64::MAX - 3, ..level }, ImageError::Outside),
    ] {
        assert_eq!(make(format, array(0x1180), 3, wrong), Some(error), "{wrong:?}");
    }
    assert_eq!(make(Format { channels: 3, ..format }, array(0x1180), 3, level), Some(ImageError::Channels));
    assert_eq!(Image::new(Shape::D2, format, array(0x2000), 1, Vec::new()).err(), Some(ImageError::Levels));
    let oblong = Image::new(Shape::Cube, format, array(0x2000), 1, vec![level]);
    assert_eq!(oblong.err(), Some(ImageError::Extent));
}

#[test]
fn view_is_a_part_of_its_image() {
    let array = Array::new(Shape::D2Layered, float(1), Extents(8, 8, 1, 12, 3))
        .paint(|[level, x, y, slice, _]| level << 24 | slice << 16 | y << 8 | x);
    let words = Format { channel: ChannelType::U32, channels: 1 };
    let view = array.image.view(Shape::Cube, words, 1..3, 3..9).expect("six faces");
    assert_eq!((view.layers(), view.levels().len(), view.levels()[0].width), (1, 2, 4));
    let seen = Array { image: Arc::new(view), bytes: Buffer::zeroed(8) };
    let cube = "tex.cube.v4.u32.f32 {%r0, _, _, _}, [%h, {%c0, %c1, %c2, %c2}];";
    let down = [0.0f32.to_bits(), (-1.0f32).to_bits(), 0.0f32.to_bits(), 0];
    assert_eq!(fetch(&seen, plain(), cube, &[down])[0][0], 1 << 24 | 6 << 16 | 2 << 8 | 2);
    assert!(array.image.view(Shape::D2Layered, float(1), 0..3, 11..13).is_err());
    assert!(array.image.view(Shape::D2Layered, float(1), 3..3, 0..1).is_err());
    assert!(array.image.view(Shape::D2Layered, float(2), 0..1, 0..1).is_err());
    assert!(array.image.view(Shape::Cube, float(1), 0..1, 0..5).is_err());
}
