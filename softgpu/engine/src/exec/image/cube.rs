//! The faces of cubes.

/// A place on the surface of a cube.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Place {
    /// +x, -x, +y, -y, +z, -z.
    pub(super) face: u32,
    /// From 0 to 1, along the rows and the columns of the face.
    pub(super) at: [f64; 2],
}

/// The components of a vector along the rows, the columns and the normal of a face.
pub(super) fn along(face: u32, [x, y, z]: [f64; 3]) -> [f64; 3] {
    match face {
        0 => [-z, -y, x],
        1 => [z, -y, -x],
        2 => [x, z, y],
        3 => [x, -z, -y],
        4 => [x, -y, z],
        _ => [-x, -y, -z],
    }
}

/// The vector to a place of a face; the coordinates run from -1 to 1 on the face.
fn direction(face: u32, u: f64, v: f64) -> [f64; 3] {
    match face {
        0 => [1.0, -v, -u],
        1 => [-1.0, -v, u],
        2 => [u, 1.0, v],
        3 => [u, -1.0, -v],
        4 => [u, -v, 1.0],
        _ => [-u, -v, -1.0],
    }
}

/// The place that a vector from the centre points to. A vector without a direction points to the centre of a face.
pub(super) fn project(vector: [f64; 3]) -> Place {
    let [x, y, z] = vector;
    let [ax, ay, az] = vector.map(f64::abs);
    let face = if ax >= ay && ax >= az {
        u32::from(x < 0.0)
    } else if ay >= az {
        2 + u32::from(y < 0.0)
    } else {
        4 + u32::from(z < 0.0)
    };
    let [u, v, normal] = along(face, vector);
    let unit = |a: f64| {
        let t = f64::midpoint(a / normal, 1.0);
        if t.is_nan() { 0.5 } else { t.clamp(0.0, 1.0) }
    };
    Place { face, at: [unit(u), unit(v)] }
}

/// The texel on the adjacent face beside the texel `(i, j)` of a face of `n` texels; exactly one of both is -1 or `n`.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "extents are below 2^17")]
pub(super) fn beside(face: u32, i: i64, j: i64, n: u32) -> (u32, i64, i64) {
    let extent = f64::from(n);
    let centre = |index: i64| (2 * index + 1) as f64 / extent - 1.0;
    let place = project(direction(face, centre(i), centre(j)));
    // The centre of the texel projects to less than half a texel beside the centre of the adjacent one.
    let [i, j] = place.at.map(|t| ((t * extent).floor() as i64).clamp(0, i64::from(n) - 1));
    (place.face, i, j)
}
