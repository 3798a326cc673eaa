//! Resources of devices: the structures of the driver's header that describe multiprocessors and work queues for green contexts.

/// Values of `CUdevResourceType`.
pub mod kind {
    /// No resource.
    pub const INVALID: u32 = 0;
    /// Multiprocessors.
    pub const SM: u32 = 1;
    /// A wish about work queues.
    pub const WORKQUEUE_CONFIG: u32 = 1000;
    /// The work queues of an existing context.
    pub const WORKQUEUE: u32 = 10_000;
}

/// Flags of `cuDevSmResourceSplitByCount`.
pub mod split_flags {
    /// Each multiprocessor counts by itself, without regard to clusters.
    pub const IGNORE_COSCHEDULING: u32 = 1;
    /// Groups that hold clusters of the largest size.
    pub const LARGEST_CLUSTER: u32 = 2;
}

/// Flags of a group of `cuDevSmResourceSplit`.
pub mod group_flags {
    /// The number of multiprocessors counts more than their places.
    pub const BACKFILL: u32 = 1;
    /// The multiprocessors are of one locality domain.
    pub const LOCALITY_DOMAIN: u32 = 2;
    /// With the flag before: more of them than the domain has by itself.
    pub const SUPPLEMENTAL: u32 = 4;
}

/// The largest value of `CUdevWorkqueueConfigScope`.
pub const LAST_SCOPE: u32 = 1;

/// The flag of `cuGreenCtxCreate`: with a default stream.
pub const DEFAULT_STREAM: u32 = 1;

/// `CUdevResource`. Programs pass it by value; a driver may put anything into its private words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C, align(8))]
pub struct DevResource {
    /// Its type, one of [`kind`].
    pub kind: u32,
    /// Words of the driver.
    pub private: [u32; 23],
    /// The fields of its type.
    pub value: [u32; 10],
    /// A pointer, null in the resources that a driver gives out.
    pub next: [u32; 2],
}

const _: () = assert!(size_of::<DevResource>() == 144);

impl DevResource {
    /// No resource.
    pub const INVALID: DevResource =
        DevResource { kind: kind::INVALID, private: [0; 23], value: [0; 10], next: [0; 2] };

    /// A resource of a type with these private words and fields; the rest are 0.
    #[must_use]
    pub fn new(kind: u32, private: &[u32], value: &[u32]) -> DevResource {
        let mut resource = DevResource { kind, ..DevResource::INVALID };
        resource.private.iter_mut().zip(private).for_each(|(word, given)| *word = *given);
        resource.value.iter_mut().zip(value).for_each(|(word, given)| *word = *given);
        resource
    }

    /// The fields of a resource of multiprocessors.
    #[must_use]
    pub const fn multiprocessors(&self) -> SmFields {
        let [count, minimum, alignment, flags, domain, ..] = self.value;
        SmFields { count, minimum, alignment, flags, domain }
    }

    /// The fields of a wish about work queues: its device, the number of workloads at a time, and the scope.
    #[must_use]
    pub const fn queues(&self) -> (i32, u32, u32) {
        (self.value[0].cast_signed(), self.value[1], self.value[2])
    }
}

/// `CUdevSmResource`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SmFields {
    /// Number of multiprocessors.
    pub count: u32,
    /// Least number of multiprocessors of a part.
    pub minimum: u32,
    /// Number of multiprocessors that run blocks of one cluster.
    pub alignment: u32,
    /// The flags of its group.
    pub flags: u32,
    /// Its locality domain, if the flags say so.
    pub domain: u32,
}

impl SmFields {
    /// The fields in their order.
    #[must_use]
    pub const fn words(self) -> [u32; 5] {
        [self.count, self.minimum, self.alignment, self.flags, self.domain]
    }

    /// The fields from their order.
    #[must_use]
    pub const fn from_words([count, minimum, alignment, flags, domain]: [u32; 5]) -> SmFields {
        SmFields { count, minimum, alignment, flags, domain }
    }
}

/// `CU_DEV_SM_RESOURCE_GROUP_PARAMS`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct GroupParameters {
    /// Number of multiprocessors; 0 asks for as many as there are.
    pub count: u32,
    /// Number of multiprocessors that run blocks of one cluster; 0 is the device's own.
    pub coscheduled: u32,
    /// The same number where the device can do better.
    pub preferred: u32,
    /// Bits of [`group_flags`].
    pub flags: u32,
    /// The locality domain.
    pub domain: u32,
    /// Words that must be 0.
    pub reserved: [u32; 11],
}

const _: () = assert!(size_of::<GroupParameters>() == 64);
