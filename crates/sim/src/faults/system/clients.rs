//! What clients do, and the judgement of what they get.

use base::{ClientId, IslandId, Nanos, Status};
use control::{Event, Reply, RequestId, Share, SliceRequest};

use super::{FaultySystem, ISLANDS};
use crate::faults::checks::WAIT_LIMIT;
use crate::faults::event::SimEvent;
use crate::faults::user::{ArrayPlace, OpenRequest, Sent, User};

impl FaultySystem {
    pub(super) fn add_users(&mut self) {
        for number in 1..=2 + self.random.below(2) {
            let client = ClientId(number);
            self.submit(Event::ClientJoined { client, share: Share::default() });
            let first = self.random.below(ISLANDS.into());
            let count = 1 + self.random.below(2);
            let on_slices = self.random.below(5) == 0;
            let places = (0..count).filter_map(|next| {
                let island = ((first + next) % u64::from(ISLANDS)) as usize;
                self.place(client, island, on_slices)
            });
            let places: Vec<ArrayPlace> = places.collect();
            let turns = 40 + self.random.below(80) as u32;
            let user = User::new(client, places, turns);
            self.note(|| format!("client {client} uses {:?}", user.places));
            self.users.push(user);
            self.soon(SimEvent::User(number as usize - 1));
        }
    }

    fn place(&mut self, client: ClientId, island: usize, is_slice: bool) -> Option<ArrayPlace> {
        let id = IslandId(island as u32);
        if is_slice {
            let wanted = SliceRequest { shape: vec![2], island: Some(id), memory: None };
            let slice = self.controller.allocate(client, &wanted).ok()?;
            return Some(ArrayPlace {
                islands: (0..ISLANDS as usize).collect(),
                devices: slice.devices,
            });
        }
        let devices = self.controller.cluster().devices();
        let devices =
            devices.filter(|device| device.island == id).map(|device| device.id).collect();
        Some(ArrayPlace { islands: vec![island], devices })
    }

    pub(super) fn turn_of_user(&mut self, user: usize) {
        if !self.users[user].is_here || self.users[user].turns == 0 {
            return;
        }
        if self.now < self.frozen_until {
            return self.at(self.frozen_until, SimEvent::User(user));
        }
        if !self.controller.is_congested(self.users[user].client) {
            let sent = self.users[user].act(self.now, &mut self.random);
            self.send(user, sent);
        }
        // Bursts, and pauses in which losses are found and islands come back.
        let pause = match self.random.below(30) {
            0 => 1_000_000 + self.random.below(3_000_000),
            1..=3 => 1_000 + self.random.below(30_000),
            _ => 1 + self.random.below(150),
        };
        self.at(Nanos(self.now.0 + pause * 1000), SimEvent::User(user));
    }

    pub(super) fn send(&mut self, user: usize, sent: Vec<Sent>) {
        let client = self.users[user].client;
        for sent in sent {
            match sent {
                Sent::Upload(upload, data) => {
                    self.submit(Event::UploadArrived { client, upload, data });
                }
                Sent::Request(id, request) => {
                    self.counts.requests += 1;
                    let what = self.users[user].asked[&id].what;
                    self.note(|| format!("client {client} requests {what} ({id}): {request:?}"));
                    self.submit(Event::Request { client, id, request });
                }
            }
        }
    }

    /// A client's connection ends.
    pub(super) fn depart(&mut self, user: usize) {
        if std::mem::replace(&mut self.users[user].is_here, false) {
            let client = self.users[user].client;
            self.note(|| format!("client {client} leaves"));
            self.users[user].asked.clear();
            self.submit(Event::ClientLeft(client));
        }
    }

    pub(super) fn reply(&mut self, client: ClientId, id: RequestId, result: Result<Reply, Status>) {
        let is_asked = |user: &User| user.client == client && user.is_here;
        let Some(number) = self.users.iter().position(is_asked) else { return };
        let Some(asked) = self.users[number].asked.remove(&id) else {
            return self.violate(format!("client {client} is answered {id} twice"));
        };
        let waited = self.now.since(asked.sent);
        let mut islands = self.users[number].islands();
        for joined in self.users.iter().map(User::joined_islands) {
            // Known: a whole program holds up its islands while it waits for another island.
            if joined.iter().any(|island| islands.contains(island)) {
                islands.extend(joined);
            }
        }
        // Known: so does a launch of another client that had an island to itself before.
        let before = Nanos(asked.sent.0.saturating_sub(self.controller.config().timeout.0));
        if self.users[number].is_new_since(before) {
            islands = (0..ISLANDS as usize).collect();
        }
        if !self.troubles.explain_wait(&islands, asked.sent) {
            self.longest_wait = self.longest_wait.max(waited);
            if waited > WAIT_LIMIT {
                let (what, waited) = (asked.what, waited.0 as f64 / 1e9);
                return self.violate(format!(
                    "client {client} has waited {waited:.3} s for {what} ({id}), and nothing is wrong \
                     with its islands {islands:?}"
                ));
            }
        }
        let judged = match &result {
            Ok(reply) => self.users[number].take(&asked, reply),
            Err(error) if self.explains(number, &asked, error) => {
                self.counts.errors += 1;
                let error = error.to_string();
                self.note(|| {
                    format!("client {client} gets an error for {} ({id}): {error}", asked.what)
                });
                return;
            }
            Err(error) => Err(format!("no loss explains the error {error}")),
        };
        if let (Ok(()), Ok(Reply::Data(_))) = (&judged, &result) {
            self.counts.reads += 1;
        }
        if let Err(wrong) = judged {
            self.violate(format!("client {client}, {} ({id}): {wrong}", asked.what));
        }
    }

    /// Whether a loss explains an error, or two slices of a client that have moved to one place.
    fn explains(&self, user: usize, asked: &OpenRequest, error: &Status) -> bool {
        let is_on_slices = self.users[user].places.iter().any(|place| place.islands.len() > 1);
        self.troubles.explain_error(&asked.lineage)
            || is_on_slices && error.message.contains("are one physical device, of two slices")
    }
}
