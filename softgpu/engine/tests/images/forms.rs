//! The forms of texture and surface instructions: the text of nvcc is accepted, and text without a meaning is not.

use softgpu_engine::{LoadErrorKind, Module};

use super::kernel;

#[test]
fn texture_and_surface_functions_of_nvcc_load() {
    for text in [include_str!("../data/textures.ptx"), include_str!("../data/surfaces.ptx")] {
        let module = Module::load(text.as_bytes(), 75).unwrap_or_else(|error| panic!("{error}"));
        assert!(!module.kernels().is_empty());
    }
}

#[test]
fn forms_that_ptxas_accepts_are_accepted() {
    for text in [
        "tex.1d.v4.f32.s32 {%r0, %r1, %r2, %r3}, [tref, %c0];",
        "tex.1d.v4.f32.s32 {%r0, %r1, %r2, %r3}, [tref, {%c0}], 3;",
        "tex.base.2d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%h, {%f0, %f1}];",
        "tex.level.2d.v4.f32.f32 {%r0, %r1, %r2, %r3}|%p, [%h, {%f0, %f1}], %f2, {1, 2};",
        "tex.level.2d.v4.f32.s32 {%r0, %r1, %r2, %r3}, [%h, {%c0, %c1}], %c2;",
        "tex.3d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%h, {%f0, %f1, %f2, %f2}], {1, 2, 3, 3};",
        "tld4.r.cube.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%h, {%f0, %f1, %f2, %f2}];",
        "sust.p.2d.b32.trap [sref, {%c0, %c1}], {%c2};",
        "suld.b.1d.b8.zero {%s0}, [sref, {%c0}];",
        "sured.p.or.1d.b32.clamp [%h, {%c0}], %c1;",
    ] {
        Module::load(kernel(text).as_bytes(), 80).unwrap_or_else(|error| panic!("{text}: {error}"));
    }
}

#[test]
fn forms_without_a_meaning_are_refused() {
    use LoadErrorKind::{Syntax, Unsupported};
    for (kind, text) in [
        (Unsupported, "tex.2d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%h, %w0, {%f0, %f1}];"),
        (Unsupported, "tex.2d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%h, {%f0, %f1}], %f2;"),
        (Unsupported, "tex.2dms.v4.f32.s32 {%r0, %r1, %r2, %r3}, [%h, {%c0, %c1, %c2, %c3}];"),
        (Syntax, "tex.2d.v4.f32.f32 {%r0, %r1, %r2}, [%h, {%f0, %f1}];"),
        (Syntax, "tex.2d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%h, {%f0}];"),
        (Syntax, "tex.2d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%c0, {%f0, %f1}];"),
        (Syntax, "tex.2d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%h + 8, {%f0, %f1}];"),
        (Syntax, "tex.2d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%h];"),
        (Syntax, "tex.2d.v4.f32 {%r0, %r1, %r2, %r3}, [%h, {%f0, %f1}];"),
        (Syntax, "tex.cube.v4.f32.s32 {%r0, %r1, %r2, %r3}, [%h, {%c0, %c1, %c2, %c2}];"),
        (Syntax, "tex.level.2d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%h, {%f0, %f1}];"),
        (Syntax, "tex.grad.2d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%h, {%f0, %f1}], {%f0}, {%f1};"),
        (Syntax, "tex.2d.v2.f32.f32 {%r0, %r1}, [%h, {%f0, %f1}];"),
        (Syntax, "tld4.x.2d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%h, {%f0, %f1}];"),
        (Syntax, "tld4.r.3d.v4.f32.f32 {%r0, %r1, %r2, %r3}, [%h, {%f0, %f1, %f2, %f2}];"),
        (Syntax, "txq.colour.b32 %r0, [%h];"),
        (Syntax, "txq.width.b64 %w0, [%h];"),
        (Syntax, "suq.filter_mode.b32 %r0, [%h];"),
        (Syntax, "suld.2d.b32.trap %r0, [%h, {%c0, %c1}];"),
        (Syntax, "suld.b.cube.b32.trap %r0, [%h, {%c0, %c1, %c2, %c2}];"),
        (Syntax, "suld.b.2d.f32.trap %r0, [%h, {%c0, %c1}];"),
        (Syntax, "suld.b.2d.v4.b64.trap {%w0, %w1, %w2, %w3}, [%h, {%c0, %c1}];"),
        (Unsupported, "sust.b.2d.b32.trap [in, {%c0, %c1}], {%c2, %c3};"),
        (Unsupported, "suld.b.2d.b32.trap {%r0, %r1}, [%h, {%c0, %c1}];"),
        (Syntax, "suld.b.2d.b32 %r0, [%h, {%c0, %c1}];"),
        (Syntax, "suld.b.2d.v2.b16.trap {%s0, %r1}, [%h, {%c0, %c1}];"),
        (Syntax, "sured.b.xor.2d.b32.trap [%h, {%c0, %c1}], %c2;"),
        (Syntax, "sured.b.add.2d.b32.trap [%h, {%c0, %c1}], %c2;"),
        (Syntax, "istypep.global %p, %h;"),
        (Syntax, "ld.global.u32 %r0, [tref];"),
    ] {
        let refusal = match Module::load(kernel(text).as_bytes(), 80) {
            Ok(module) => module.kernels()[0].refusal.clone().unwrap_or_else(|| panic!("{text}: accepted")),
            Err(error) => error,
        };
        assert_eq!(refusal.kind, kind, "{text}: {refusal}");
    }
    let header = ".version 8.0\n.target sm_80\n.address_size 64\n";
    for (kind, text) in [
        (Unsupported, ".global .samplerref s;"),
        (Unsupported, ".global .texref t[4];"),
        (Unsupported, ".global .texref t = { width = 4 };"),
        (Syntax, ".global .texref t; .global .texref t;"),
        (Syntax, ".global .texref;"),
    ] {
        let error = Module::load(format!("{header}{text}\n").as_bytes(), 80).err().expect("refused");
        assert_eq!(error.kind, kind, "{text}: {error}");
    }
}
