"""Signatures, verified by two implementations that are not ours: standardwebhooks and the openai package."""

import base64
import time

import openai
import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from media_server.webhooks.signing import new_secret, sign, signed_headers

BODY = b'{"id":"evt_1","object":"event","created_at":1,"type":"video.completed","data":{"id":"video_1"}}'


def test_signature_of_the_specifications_example() -> None:
    # the worked example of the Standard Webhooks specification's reference libraries
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = b'{"test": 2432232314}'
    signature = sign(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, body)
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_standardwebhooks_verifies() -> None:
    secret = new_secret()
    headers = signed_headers([secret], "evt_1", int(time.time()), BODY)
    assert Webhook(secret).verify(BODY, headers)["data"] == {"id": "video_1"}
    with pytest.raises(WebhookVerificationError):
        Webhook(secret).verify(BODY + b" ", headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(new_secret()).verify(BODY, headers)


def test_openai_package_unwraps() -> None:
    secret = new_secret()
    headers = signed_headers([secret], "evt_1", int(time.time()), BODY)
    client = openai.OpenAI(api_key="none", base_url="http://127.0.0.1:9", webhook_secret=secret)
    assert client.webhooks.unwrap(BODY.decode(), headers).id == "evt_1"
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(BODY.decode(), {**headers, "webhook-id": "evt_2"})


def test_both_secrets_of_a_rotation_verify() -> None:
    new, old = new_secret(), new_secret()
    headers = signed_headers([new, old], "evt_1", int(time.time()), BODY)
    for secret in (new, old):
        Webhook(secret).verify(BODY, headers)


def test_secrets_are_of_32_random_bytes() -> None:
    secrets = {new_secret() for _ in range(50)}
    assert len(secrets) == 50
    assert {len(base64.b64decode(secret.removeprefix("whsec_"))) for secret in secrets} == {32}


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_!!!", "whsec_" + base64.b64encode(b"x" * 23).decode(), "abcd"])
def test_a_secret_that_is_none_is_refused(secret: str) -> None:
    with pytest.raises(ValueError, match="webhook secret"):
        sign(secret, "evt_1", 1, BODY)
