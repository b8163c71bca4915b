//! Certificates that a controller's owner has from elsewhere.

use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    date_time_ymd,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use transport::{
    Authority, Gateway, Grant, PeerRole, Remote, Service, ServiceAddress, Token, Tokens,
    TransportError,
};

/// An authority of a company, which signs for many.
struct Company {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Company {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Signs a certificate for a server; returns the chain and the private key.
    fn sign(&self, name: &str, last_year: i32) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(last_year, 1, 1);
        let leaf = params.signed_by(&key, &self.issuer).unwrap();
        (format!("{}{}", leaf.pem(), self.pem), key.serialize_pem())
    }

    fn authority(&self, name: &str) -> Authority {
        let (chain, key) = self.sign(name, 2090);
        Authority::given(&chain, &key).unwrap()
    }
}

/// Listens with a certificate, offers a service that answers, and returns the value that keeps it open.
async fn listen(authority: &Authority, tokens: &Arc<Tokens>) -> Gateway {
    let refused = |_| ();
    let gateway = Gateway::open("127.0.0.1:0", authority, tokens.clone(), refused).await.unwrap();
    let (arrivals, mut arrived) = mpsc::channel(4);
    let address = ServiceAddress::Inside(arrivals);
    tokio::spawn(async move {
        while let Some(mut arrival) = arrived.recv().await {
            let _ = arrival.write_all(b"x").await;
            let _ = arrival.flush().await;
        }
    });
    gateway.offer("hosts", Service { role: PeerRole::Host, address });
    gateway
}

async fn answers(gateway: &Gateway, token: &Token) -> Result<u8, TransportError> {
    let remote = Remote::new(&gateway.address().to_string(), token.clone());
    Ok(remote.connect("hosts").await?.read_u8().await.unwrap())
}

#[tokio::test]
async fn tokens_know_a_certificate_from_elsewhere() {
    let company = Company::new();
    let (authority, tokens) = (company.authority("fairway.example.org"), Arc::default());
    let token = Tokens::create(&tokens, PeerRole::Host, &authority, Grant::default(), None);
    let token: Token = token.to_string().parse().unwrap();
    assert_eq!(authority.to_pem(), None, "it is kept by its owner");
    let first = listen(&authority, &tokens).await;
    assert_eq!(answers(&first, &token).await.unwrap(), b'x');
    let renewed = listen(&company.authority("fairway.example.org"), &tokens).await;
    assert_eq!(answers(&renewed, &token).await.unwrap(), b'x', "a renewed one is known as well");
}

#[tokio::test]
async fn others_of_the_same_authority_are_not_the_controller() {
    let (company, tokens) = (Company::new(), Arc::default());
    let ours = company.authority("fairway.example.org");
    let token = Tokens::create(&tokens, PeerRole::Host, &ours, Grant::default(), None);
    let named_alike = Company::new().authority("fairway.example.org");
    for other in
        [company.authority("laptop.example.org"), named_alike, Authority::create().unwrap()]
    {
        let gateway = listen(&other, &tokens).await;
        let error = answers(&gateway, &token).await.unwrap_err();
        assert!(matches!(error, TransportError::NotTheController { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_certificate_that_expires_is_refused_by_peers() {
    let (company, tokens) = (Company::new(), Arc::default());
    // It is valid for a moment, so it can be given; then its peers refuse it.
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["fairway.example.org".to_owned()]).unwrap();
    params.not_before = date_time_ymd(2020, 1, 1);
    let moment = std::time::Duration::from_secs(2);
    params.not_after = (std::time::SystemTime::now() + moment).into();
    let leaf = params.signed_by(&key, &company.issuer).unwrap();
    let chain = format!("{}{}", leaf.pem(), company.pem);
    let authority = Authority::given(&chain, &key.serialize_pem()).unwrap();
    let token = Tokens::create(&tokens, PeerRole::Host, &authority, Grant::default(), None);
    let gateway = listen(&authority, &tokens).await;
    tokio::time::sleep(2 * moment).await;
    let error = answers(&gateway, &token).await.unwrap_err().to_string();
    assert!(error.to_lowercase().contains("expired"), "{error}");
}

#[test]
fn certificates_that_cannot_be_used_are_refused() {
    let company = Company::new();
    let (chain, key) = company.sign("fairway.example.org", 2090);
    let alone = chain.split_inclusive("-----END CERTIFICATE-----").next().unwrap();
    let (late, late_key) = company.sign("fairway.example.org", 2021);
    let foreign = format!("{alone}\n{}", Company::new().pem);
    let nameless = company.sign("127.0.0.1", 2090);
    let cases = [
        (alone, &*key, "has 1; expected the controller's, and last that of the authority"),
        ("no certificate", &*key, "has 0; expected"),
        (&*chain, "no key", "the file of the private key"),
        (&*chain, &*late_key, "the private key is not its own"),
        (&*foreign, &*key, "BadSignature"),
        (&*late, &*late_key, "expired"),
        (&*nameless.0, &*nameless.1, "it has no DNS name"),
    ];
    for (chain, key, says) in cases {
        let error = Authority::given(chain, key).map(drop).unwrap_err().to_string();
        assert!(error.contains(says), "{says}: {error}");
    }
}
