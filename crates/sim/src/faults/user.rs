//! A modelled client: makes, moves, computes and reads arrays, and knows what they must be.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use base::{ClientId, DeviceId, Nanos, Random};
use control::{CopySemantics, Handle, PutShard, Reply, Request, RequestId};
use ir::{ArraySpec, DType, Dims, Sharding};
use protocol::Compiled;
use smallvec::smallvec;

use super::checks::{IslandsSince, joined};
use crate::modelled::{self, halves};

/// Elements of an array, of which each host has half; large enough to be striped over channels.
const ELEMENTS: i64 = 1 << 16;
/// Values of new arrays.
const VALUES: u64 = 8;
const ARRAYS_MAX: usize = 6;
const REQUESTS_MAX: usize = 24;

static UPLOADS: LazyLock<Vec<bytes::Bytes>> = LazyLock::new(|| {
    (0..VALUES).map(|value| vec![value as u8; ELEMENTS as usize / 2].into()).collect()
});

/// Returns what a computation makes of an array.
pub(super) fn computed(values: [i64; 2]) -> [i64; 2] {
    let mixed = (values[0] * 31 + values[1] * 17) % 1_000_003;
    [mixed + 1, mixed + 2]
}

/// The description of a function of one array.
pub(super) fn compiled() -> Compiled {
    modelled::compiled("mix", DType::U8, &[ELEMENTS], halves())
}

/// An array as it must be.
#[derive(Debug, Clone)]
struct Array {
    place: usize,
    values: [i64; 2],
    lineage: IslandsSince,
}

/// What a reply must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ExpectedReply {
    Any,
    Data(i64),
    /// The program of these places.
    Program(Vec<usize>),
    /// This array is computed.
    Computed(Handle),
}

/// A request without an answer.
#[derive(Debug, Clone)]
pub(super) struct OpenRequest {
    pub what: &'static str,
    pub sent: Nanos,
    pub expected: ExpectedReply,
    pub lineage: IslandsSince,
}

/// A place of arrays: the devices of an island, or a slice.
#[derive(Debug, Clone)]
pub(super) struct ArrayPlace {
    /// Islands that it may be on.
    pub islands: Vec<usize>,
    pub devices: Vec<DeviceId>,
}

/// One client.
#[derive(Debug)]
pub(super) struct User {
    pub client: ClientId,
    pub places: Vec<ArrayPlace>,
    pub is_here: bool,
    /// Operations that it will still do.
    pub turns: u32,
    pub asked: BTreeMap<RequestId, OpenRequest>,
    arrays: BTreeMap<Handle, Array>,
    programs: BTreeMap<Vec<usize>, Handle>,
    /// When it first used each place.
    used: BTreeMap<usize, Nanos>,
    next: u64,
}

/// What a client sends.
#[derive(Debug)]
pub(super) enum Sent {
    Upload(Handle, bytes::Bytes),
    Request(RequestId, Request),
}

impl User {
    pub fn new(client: ClientId, places: Vec<ArrayPlace>, turns: u32) -> Self {
        Self {
            client,
            places,
            is_here: true,
            turns,
            asked: BTreeMap::new(),
            arrays: BTreeMap::new(),
            programs: BTreeMap::new(),
            used: BTreeMap::new(),
            next: 1,
        }
    }

    /// Islands that it uses.
    pub fn islands(&self) -> Vec<usize> {
        self.places.iter().flat_map(|place| place.islands.iter().copied()).collect()
    }

    /// Islands of its programs over several places.
    pub fn joined_islands(&self) -> Vec<usize> {
        let programs = self.programs.keys().filter(|places| places.len() > 1).flatten();
        programs.flat_map(|&place| self.places[place].islands.iter().copied()).collect()
    }

    fn name(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn spec(&self, place: usize) -> ArraySpec {
        let devices = self.places[place].devices.as_slice().into();
        let sharding = Sharding { devices, memory: None, partition: halves() };
        ArraySpec { dtype: DType::U8, dims: Dims::from_slice(&[ELEMENTS]), sharding }
    }

    /// Whether it first used one of its places after this time.
    pub fn is_new_since(&self, time: Nanos) -> bool {
        self.used.values().any(|&first| first > time)
    }

    fn since(&mut self, place: usize, now: Nanos) -> IslandsSince {
        self.used.entry(place).or_insert(now);
        self.places[place].islands.iter().map(|&island| (island, now)).collect()
    }

    fn ask(
        &mut self,
        what: &'static str,
        now: Nanos,
        (lineage, expected): (IslandsSince, ExpectedReply),
        request: Request,
        out: &mut Vec<Sent>,
    ) {
        let id = self.name();
        self.asked.insert(id, OpenRequest { what, sent: now, expected, lineage });
        out.push(Sent::Request(id, request));
    }

    /// Does one operation, unless it waits for replies.
    pub fn act(&mut self, now: Nanos, random: &mut Random) -> Vec<Sent> {
        let mut out = Vec::new();
        let compiles =
            self.asked.values().any(|asked| matches!(asked.expected, ExpectedReply::Program(_)));
        if compiles || self.asked.len() > REQUESTS_MAX {
            return out;
        }
        self.turns = self.turns.saturating_sub(1);
        if self.arrays.is_empty() {
            self.put(now, random, &mut out);
            return out;
        }
        let chosen = random.below(self.arrays.len() as u64) as usize;
        let (handle, array) = self.arrays.iter().nth(chosen).expect("below their number");
        let (handle, array) = (*handle, array.clone());
        let other = random.below(self.places.len() as u64) as usize;
        match random.below(12) {
            0 => self.put(now, random, &mut out),
            1..=4 => self.compute(now, (handle, &array), &[array.place], &mut out),
            5 | 6 if other != array.place => {
                self.send(now, (handle, &array), other, random, &mut out);
            }
            7 if other != array.place => {
                self.compute(now, (handle, &array), &[array.place, other], &mut out);
            }
            8 => {
                let request = Request::CheckReady { arrays: vec![handle] };
                let about = (array.lineage, ExpectedReply::Computed(handle));
                self.ask("readiness", now, about, request, &mut out);
            }
            9 => self.destruct(now, &[handle], &mut out),
            _ => self.read(now, (handle, &array), &mut out),
        }
        if self.arrays.len() > ARRAYS_MAX {
            let oldest = *self.arrays.keys().next().expect("there are some");
            self.destruct(now, &[oldest], &mut out);
        }
        out
    }

    fn put(&mut self, now: Nanos, random: &mut Random, out: &mut Vec<Sent>) {
        let place = random.below(self.places.len() as u64) as usize;
        let values = [random.below(VALUES), random.below(VALUES)];
        let shards = values.iter().enumerate().map(|(position, &value)| {
            let upload = self.name();
            out.push(Sent::Upload(upload, UPLOADS[value as usize].clone()));
            let dims = Dims::from_slice(&[ELEMENTS / 2]);
            PutShard { positions: vec![position as u32], upload, dims, byte_strides: None }
        });
        let shards = shards.collect();
        let array = self.name();
        let lineage = self.since(place, now);
        let request = Request::Put { array, spec: self.spec(place), shards };
        self.ask("an array", now, (lineage.clone(), ExpectedReply::Any), request, out);
        let values = values.map(|value| value as i64);
        self.arrays.insert(array, Array { place, values, lineage });
    }

    /// Runs a function on one place, or a program there and back over two.
    fn compute(
        &mut self,
        now: Nanos,
        (handle, array): (Handle, &Array),
        places: &[usize],
        out: &mut Vec<Sent>,
    ) {
        let all = IslandsSince::new();
        let used = places.iter().fold(all, |all, &place| joined(&all, &self.since(place, now)));
        let Some(&executable) = self.programs.get(places) else {
            let request = self.compile(places);
            let about = (used, ExpectedReply::Program(places.to_vec()));
            return self.ask("a compilation", now, about, request, out);
        };
        let made = self.name();
        let request = Request::Execute {
            executable,
            args: smallvec![handle],
            results: smallvec![made],
            keep: smallvec![],
            status: None,
            stream: 0,
            devices: Vec::new(),
        };
        let lineage = joined(&array.lineage, &used);
        self.ask("a run", now, (lineage.clone(), ExpectedReply::Any), request, out);
        let times = places.len();
        let values = (0..times).fold(array.values, |values, _| computed(values));
        self.arrays.insert(made, Array { place: array.place, values, lineage });
    }

    fn compile(&self, places: &[usize]) -> Request {
        let devices = |place: &usize| self.places[*place].devices.clone();
        let all: Vec<DeviceId> = places.iter().flat_map(devices).collect();
        let devices: Arc<[DeviceId]> = all.into();
        if places.len() == 1 {
            return Request::Compile {
                program: Vec::new(),
                options: Vec::new(),
                devices,
                grid: (1, 2),
            };
        }
        let kind = format!("uint8[{ELEMENTS}] tiled 2 on");
        let text = format!(
            "program @there_and_back\nfunction @f\nfunction @g\n\
             input %0: {kind} [0,1]\n\
             node %1: {kind} [0,1] = call @f (%0)\n\
             node %2: {kind} [2,3] = move (%1)\n\
             node %3: {kind} [2,3] = call @g (%2)\n\
             node %4: {kind} [0,1] = move (%3)\n\
             return (%4)\n"
        );
        Request::CompileProgram { program: text.into_bytes(), options: Vec::new(), devices }
    }

    fn send(
        &mut self,
        now: Nanos,
        (handle, array): (Handle, &Array),
        place: usize,
        random: &mut Random,
        out: &mut Vec<Sent>,
    ) {
        let made = self.name();
        let all =
            [CopySemantics::AlwaysCopy, CopySemantics::ReuseInput, CopySemantics::DonateInput];
        let semantics = all[random.below(3) as usize];
        let request = Request::Reshard {
            arrays: vec![handle],
            results: vec![made],
            specs: vec![self.spec(place)],
            semantics,
        };
        let lineage = joined(&array.lineage, &self.since(place, now));
        self.ask("a transfer", now, (lineage.clone(), ExpectedReply::Any), request, out);
        self.arrays.insert(made, Array { place, values: array.values, lineage });
        if semantics == CopySemantics::DonateInput {
            self.destruct(now, &[handle], out);
        }
    }

    fn read(&mut self, now: Nanos, (handle, array): (Handle, &Array), out: &mut Vec<Sent>) {
        let parts = [self.name(), self.name()];
        let request = Request::Disassemble { array: handle, results: parts.to_vec() };
        self.ask("shards", now, (array.lineage.clone(), ExpectedReply::Any), request, out);
        for (part, value) in parts.into_iter().zip(array.values) {
            let request = Request::Read { array: part, byte_strides: None };
            let about = (array.lineage.clone(), ExpectedReply::Data(value));
            self.ask("a read", now, about, request, out);
        }
        let request = Request::Destruct { arrays: parts.to_vec() };
        self.ask("a destruction", now, (IslandsSince::new(), ExpectedReply::Any), request, out);
    }

    /// Reads all arrays.
    pub fn read_all(&mut self, now: Nanos) -> Vec<Sent> {
        let mut out = Vec::new();
        for (handle, array) in self.arrays.clone() {
            self.read(now, (handle, &array), &mut out);
        }
        out
    }

    fn destruct(&mut self, now: Nanos, handles: &[Handle], out: &mut Vec<Sent>) {
        for handle in handles {
            self.arrays.remove(handle);
        }
        let request = Request::Destruct { arrays: handles.to_vec() };
        self.ask("a destruction", now, (IslandsSince::new(), ExpectedReply::Any), request, out);
    }

    /// Takes the reply to a request.
    ///
    /// # Errors
    /// The reply is wrong.
    pub fn take(&mut self, asked: &OpenRequest, reply: &Reply) -> Result<(), String> {
        match (&asked.expected, reply) {
            (ExpectedReply::Data(value), Reply::Data(data)) => {
                let found = data[..].try_into().map_or(i64::MIN, i64::from_le_bytes);
                if found != *value {
                    return Err(format!("{found} was read where {value} is right"));
                }
            }
            (ExpectedReply::Program(places), Reply::Compiled { executable, .. }) => {
                self.programs.insert(places.clone(), *executable);
            }
            (ExpectedReply::Computed(handle), Reply::Done) => {
                // It is whole: only a later loss of its own island matters.
                if let Some(array) = self.arrays.get_mut(handle) {
                    let islands = &self.places[array.place].islands;
                    array.lineage = islands.iter().map(|&island| (island, asked.sent)).collect();
                }
            }
            (ExpectedReply::Any, _) => {}
            (expected, reply) => return Err(format!("{reply:?} where {expected:?} is expected")),
        }
        Ok(())
    }
}
